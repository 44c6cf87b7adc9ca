"""Members and a real leader over loopback; ranks as threads of this process."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest

from allreduce.cluster.leader import channel, rpc, service
from allreduce.cluster.leader.client import LeaderStore
from allreduce.cluster.leader.meeting import PATIENCE, Meeting
from allreduce.cluster.leader.rpc import MAX_VALUE_BYTES
from allreduce.cluster.leader.service import Leader
from allreduce.cluster.store import SilentError
from allreduce.cluster.world import LeaderLeftError, World
from allreduce.errors import ClosedError, JoinError, PeerLostError, TimeoutError, UsageError
from tests.cluster.conftest import Write
from tests.cluster.processes import free_address, running, wait_until

SECRET = b"shared"
T = TypeVar("T")


def meeting(
    address: str,
    rank: int,
    size: int,
    *,
    secret: bytes = SECRET,
    generation: int = 1,
    **more: float,
) -> Meeting:
    return Meeting(
        rank=rank,
        size=size,
        addresses=(address,),
        secret=secret,
        generation=generation,
        timeout=more.get("timeout", 20),
        source="leader",
        why="",
        whereabouts="the test",
        patience=more.get("patience", PATIENCE),
    )


@contextlib.contextmanager
def hosting(size: int, secret: bytes = SECRET, timeout: float = 300) -> Iterator[Leader]:
    leader = Leader("127.0.0.1:0", size, secret, timeout)
    try:
        yield leader
    finally:
        leader.close()


@contextlib.contextmanager
def worlds(size: int, timeout: float = 300) -> Iterator[list[World]]:
    """Have `size` members of one leader, all in this process."""
    with hosting(size, timeout=timeout) as leader:
        joined = in_parallel(meeting(leader.address, rank, size).join for rank in range(size))
        try:
            yield joined
        finally:
            in_parallel(world.close for world in joined)


@contextlib.contextmanager
def held(leader: Leader) -> Iterator[None]:
    """Have the leader do nothing in the block, as one whose process is busy, or stopped."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        over.wait(60)

    assert leader._loop is not None
    leader._loop.call_soon_threadsafe(hold)
    assert begun.wait(25)
    try:
        yield
    finally:
        over.set()


def in_parallel(jobs: Iterable[Callable[[], T]]) -> list[T]:
    listed = list(jobs)
    with ThreadPoolExecutor(len(listed)) as pool:
        return [future.result(60) for future in [pool.submit(job) for job in listed]]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_all_members_exchange(size: int) -> None:
    with worlds(size) as joined:
        got = in_parallel(
            partial(world.exchange, "k", bytes([world.rank]) * 3, 20) for world in joined
        )
        assert got == [[bytes([rank]) * 3 for rank in range(size)]] * size
        assert len({world.job for world in joined}) == 1
        assert all(world.members == joined[0].members for world in joined)


def test_get_blocks_until_set_and_sees_binary_values() -> None:
    value = bytes(range(256)) * 1000
    with worlds(2) as joined:
        threading.Timer(0.2, joined[1].store.set, ("k", value)).start()
        assert joined[0].store.get("k", 20) == value
        joined[1].store.set("k", b"")
        assert joined[0].store.get("k", 20) == b""


def test_news_arrive_and_never_fail() -> None:
    with worlds(3) as joined:
        part = joined[1].subset([1, 2], "part")
        part.store.post("k", b"last words")
        joined[1].close()
        assert joined[2].subset([1, 2], "part").store.get("k", 20) == b"last words"
        joined[1].store.post("k", b"")  # nobody hears
        joined[2].store.set("still", b"asked")
        assert joined[0].store.get("still", 20) == b"asked"


def test_get_times_out_naming_rank_and_key() -> None:
    with worlds(2) as joined, pytest.raises(TimeoutError, match=r"rank 1: no member set 'absent'"):
        joined[1].store.get("absent", 0.2)


def test_exchange_times_out_naming_the_rank_that_did_not_come() -> None:
    with worlds(3) as joined:
        joined[0].store.set("k/0", b"")
        with pytest.raises(
            TimeoutError, match=r"rank 1: rank 2 did not come within 0.3 s to where"
        ):
            joined[1].exchange("k", b"", 0.3)


def test_many_threads_of_one_member_can_block_at_once() -> None:
    with worlds(2) as joined:

        def get(number: int) -> bytes:
            return joined[0].store.get(f"k{number}", 20)

        with ThreadPoolExecutor(50) as pool:
            waiting = [pool.submit(get, number) for number in range(50)]
            for number in range(50):
                joined[1].store.set(f"k{number}", str(number).encode())
            assert [future.result(20) for future in waiting] == [b"%d" % n for n in range(50)]


def test_a_value_above_the_cap_is_refused_and_one_at_the_cap_passes() -> None:
    with worlds(2) as joined:
        with pytest.raises(UsageError, match=rf"'big' has {MAX_VALUE_BYTES + 1} bytes"):
            joined[0].store.set("big", bytes(MAX_VALUE_BYTES + 1))
        joined[0].store.set("big", bytes(MAX_VALUE_BYTES))
        assert len(joined[1].store.get("big", 20)) == MAX_VALUE_BYTES


def test_news_above_the_cap_are_dropped_and_the_store_goes_on() -> None:
    with worlds(2) as joined:
        joined[0].store.post("big", bytes(MAX_VALUE_BYTES + 2**17))
        joined[0].store.set("small", b"here")
        assert joined[1].store.get("small", 20) == b"here"
        assert joined[1].store.try_get("big", 20) is None


def test_closed_store_says_so() -> None:
    with worlds(2) as joined:
        joined[0].close()
        with pytest.raises(ClosedError):
            joined[0].store.get("k", 1)


def test_a_lost_member_is_named_to_those_who_wait_before_its_heartbeats_are_missed() -> None:
    with worlds(3, timeout=300) as joined:
        lost = joined[2].store
        assert isinstance(lost, LeaderStore)

        def wait(world: World) -> None:
            with pytest.raises(PeerLostError, match=r"rank 2 \(process \d+ on .+\) is gone"):
                world.exchange("never", b"", 30)

        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(wait, world) for world in joined[:2]]
            time.sleep(0.2)
            lost.abandon()
            for future in waiting:
                future.result(40)


def test_a_stopped_member_is_lost_when_its_heartbeats_stop(script: Write) -> None:
    path = script("time.sleep(60)")
    with hosting(2) as leader:
        leader.silence = 2.5
        environment = {
            "ALLREDUCE_RANK": "1",
            "ALLREDUCE_SIZE": "2",
            "ALLREDUCE_LEADER": leader.address,
            "ALLREDUCE_SECRET": SECRET.decode(),
        }
        with running([sys.executable, str(path)], environment) as process:
            world = meeting(leader.address, 0, 2).join()
            process.signal(signal.SIGSTOP)
            expected = rf"rank 1 \(process {process.pid} on .+\) is gone: its heartbeats stopped"
            with pytest.raises(PeerLostError, match=expected):
                world.store.get("never", 30)
            world.close()


def test_a_short_timeout_makes_no_death_of_a_pause_between_heartbeats() -> None:
    with worlds(2, timeout=0.1) as joined:
        time.sleep(1.5)
        joined[0].store.set("k", b"v")
        assert joined[1].store.get("k", 25) == b"v"


def test_a_member_that_was_stopped_takes_no_leader_for_silent(script: Write) -> None:
    ends = "for _ in range(5): time.sleep(0.1)\nworld.store.get('k', 5)"
    path = script(f"print('joined', flush=True)\n{ends}")
    quick = "from allreduce.cluster.leader import channel, rpc\n"
    quick += "channel.BEAT_SECONDS, rpc._SILENCE_SECONDS = 0.1, 2.0\n"
    path.write_text(quick + path.read_text())
    with hosting(2) as leader:
        environment = {
            "ALLREDUCE_RANK": "1",
            "ALLREDUCE_SIZE": "2",
            "ALLREDUCE_LEADER": leader.address,
            "ALLREDUCE_SECRET": SECRET.decode(),
            "ALLREDUCE_TIMEOUT": "2",
        }
        with running([sys.executable, str(path)], environment) as process:
            world = meeting(leader.address, 0, 2).join()
            world.store.set("k", b"")
            assert process.line() == "joined"
            process.signal(signal.SIGSTOP)
            time.sleep(2.5)
            process.signal(signal.SIGCONT)
            result = process.finish(25)
            world.close()
    assert result.code == 0, result


def test_a_look_does_not_wait_for_a_leader_that_is_busy() -> None:
    with hosting(1) as leader:
        world = meeting(leader.address, 0, 1).join()
        assert world.store.try_get("k", 10) is None
        world.store.set("k", b"v")
        assert world.store.try_get("k", 10) == b"v"
        with held(leader), pytest.raises(SilentError):
            world.store.try_get("k", 0.05)
        assert world.store.try_get("k", 10) == b"v"
        world.close()


def test_who_asks_often_notices_that_the_leader_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BEAT_SECONDS", 0.3)
    monkeypatch.setattr(rpc, "_SILENCE_SECONDS", 0.5)
    with hosting(1) as leader:
        world = meeting(leader.address, 0, 1, timeout=0.5).join()
        said = r"is gone: it has been silent for 0\.5 s"

        def ask_often() -> None:
            until = time.monotonic() + 25
            while time.monotonic() < until:
                with contextlib.suppress(SilentError):
                    world.store.try_get("k", 0.01)

        with held(leader), pytest.raises(PeerLostError, match=said):
            ask_often()
        world.close()


def test_members_learn_of_the_leaders_death() -> None:
    with hosting(2) as leader:
        joined = in_parallel(meeting(leader.address, rank, 2).join for rank in range(2))
        threading.Timer(0.2, leader.close).start()
        with pytest.raises(
            PeerLostError, match=f"leader at {leader.address}, in the test, is gone"
        ):
            joined[0].store.get("never", 30)
        with pytest.raises(PeerLostError):
            joined[1].store.set("k", b"")


def test_members_can_tell_that_the_leaders_host_left_in_good_order() -> None:
    with hosting(2) as leader:
        joined = in_parallel(meeting(leader.address, rank, 2).join for rank in range(2))
        threading.Timer(0.1, leader.close, (0.1,)).start()
        told = f"hosts the group leader at {leader.address}, left normally"
        with pytest.raises(LeaderLeftError, match=told):
            joined[0].store.get("never", 30)


def test_a_host_that_fails_lets_the_others_read_what_stands_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_FAILED_SECONDS", 60)
    monkeypatch.setattr(service, "_FAILED_QUIET_SECONDS", 25)
    with hosting(2) as leader:
        meetings = [meeting(leader.address, rank, 2) for rank in range(2)]
        joined = in_parallel(
            replace(one, hosted=leader if one.rank == 0 else None).join for one in meetings
        )
        failing = joined[0].store
        assert isinstance(failing, LeaderStore)
        failing.set("k", b"why")
        failing.abandon()
        with ThreadPoolExecutor(1) as pool:
            ending = pool.submit(joined[0].close)
            assert joined[1].store.get("k", 25) == b"why"
            with pytest.raises(PeerLostError, match=r"rank 0 \(process \d+ on .+\) is gone"):
                joined[1].store.get("never", 25)
            joined[1].close()
            ending.result(20)


def test_closing_stays_for_a_member_that_has_yet_to_ask_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "QUIET_SECONDS", 60)
    with hosting(2) as leader, ThreadPoolExecutor(2) as pool:
        joining = pool.submit(meeting(leader.address, 0, 2).join)
        connection, _ = meeting(leader.address, 1, 2)._connect()
        joining.result(25).close()
        wait_until(lambda: leader.attending == 1)
        leader.asked -= 120  # as if the other one had had no CPU since then
        closing = pool.submit(leader.close, 60)
        wait_until(lambda: leader.closing)
        time.sleep(0.3)  # in which it would end
        store = LeaderStore(connection, 1, "rank 0", None)
        assert [member.rank for member in store.assemble(25)] == [0, 1]
        store.close()
        closing.result(25)


def test_closing_stays_for_members_that_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "QUIET_SECONDS", 60)
    with hosting(2) as leader:
        joined = in_parallel(meeting(leader.address, rank, 2).join for rank in range(2))
        joined[0].close()
        closing = threading.Thread(target=leader.close, args=(60,))
        closing.start()
        joined[1].store.set("k", b"still served")
        assert joined[1].store.get("k", 25) == b"still served"
        joined[1].close()
        closing.join(25)
        assert not closing.is_alive()


def test_one_leader_serves_generation_after_generation() -> None:
    with hosting(2) as leader:
        jobs = set()
        for generation in (1, 2, 3):
            joined = in_parallel(
                meeting(leader.address, rank, 2, generation=generation).join for rank in range(2)
            )
            with pytest.raises(TimeoutError):  # the last generation's keys are not seen in this one
                joined[0].store.get("k", 0.1)
            joined[0].store.set("k", b"")
            jobs.add(joined[0].job)
            in_parallel(world.close for world in joined)
        assert len(jobs) == 3


def refused(leader: Leader, match: str, **changes: object) -> None:
    """Check that a changed member is refused, and that the leader goes on."""
    told = {"rank": 0, "size": 2} | changes
    with pytest.raises(JoinError, match=match):
        meeting(leader.address, **told).join()  # type: ignore[arg-type]


def test_offenders_are_refused_and_the_others_join() -> None:
    with hosting(2) as leader:
        refused(leader, "does not know this process's secret", secret=b"other")
        refused(leader, "does not know this process's secret", secret=b"")
        refused(leader, "rank 0 says that the job has 3 ranks, but its leader expects 2", size=3)
        refused(leader, "rank 5 is out of range: the job has 2 ranks, 0 to 1", rank=5)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(meeting(leader.address, 0, 2).join)
            wait_until(lambda: 1 in leader.groups and leader.groups[1].connected == [0])
            refused(leader, r"rank 0 is claimed twice: by process \d+ on .+ and by process \d+ on")
            second = meeting(leader.address, 1, 2).join()
            assert first.result(20).members == second.members
            second.close()
            first.result().close()


def test_a_rank_that_waits_in_vain_names_the_missing_and_can_try_again() -> None:
    with hosting(3) as leader:
        with pytest.raises(TimeoutError, match=r"rank 0: ranks 1, 2 did not join at 127\.0\.0\.1"):
            meeting(leader.address, 0, 3, timeout=0.3).join()
        joined = in_parallel(meeting(leader.address, rank, 3).join for rank in range(3))
        in_parallel(world.close for world in joined)


def test_an_address_without_a_leader_is_named_within_ten_seconds() -> None:
    with socket.socket() as deaf, ThreadPoolExecutor(2) as pool:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        nobodys, strangers = free_address(), f"127.0.0.1:{deaf.getsockname()[1]}"
        began = time.monotonic()
        first, second = (
            pool.submit(meeting(at, 1, 2, patience=1.5).join) for at in (nobodys, strangers)
        )
        with pytest.raises(JoinError, match=f"no group leader is reachable at {nobodys}"):
            first.result()
        with pytest.raises(JoinError, match=strangers):
            second.result()
        assert time.monotonic() - began < 10


def test_a_member_may_come_before_its_leader() -> None:
    address = free_address()
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(meeting(address, 1, 2).join)
        time.sleep(1)
        leader = Leader(address, 2, SECRET)
        try:
            other = meeting(address, 0, 2).join()
            other.close()
            early.result(20).close()
        finally:
            leader.close()


# Frames of HTTP/2: settings, which make a connection ready, and its end (RFC 9113, 6.5 and 6.8).
READY = b"\0\0\0\x04\0\0\0\0\0"
GONE = b"\0\0\x08\x07\0\0\0\0\0" + bytes(8)


@pytest.mark.parametrize("ends", [True, False])
def test_a_connection_to_a_leader_that_closes_is_followed_by_one_to_the_next(ends: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{closing.getsockname()[1]}"
        joining = pool.submit(meeting(address, 0, 1, patience=3).join)
        connection, _ = closing.accept()
        closing.close()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(READY + (GONE if ends else b""))
            if ends:
                connection.close()
            leader = Leader(address, 1, SECRET)
            try:
                joining.result(20).close()
            finally:
                leader.close()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "192.0.2.1:4711"])
def test_no_network_without_a_secret(address: str) -> None:
    with pytest.raises(UsageError, match="not on the loopback interface"):
        Leader(address, 2, b"")
    with pytest.raises(UsageError, match="not on the loopback interface"):
        meeting(address, 0, 2, secret=b"").join()


def test_another_interface_with_a_secret() -> None:
    leader = Leader("0.0.0.0:0", 1, SECRET)
    try:
        meeting(f"127.0.0.1:{leader.address.rpartition(':')[2]}", 0, 1).join().close()
    finally:
        leader.close()


def test_two_leaders_cannot_share_a_port() -> None:
    with hosting(2) as leader, pytest.raises(JoinError, match=leader.address):
        Leader(leader.address, 2, SECRET)


def test_a_leader_that_closes_as_its_member_is_lost_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for _ in range(100):  # gRPC printed a traceback in every twentieth or so
        leader = Leader("127.0.0.1:0", 1, SECRET)
        store = meeting(leader.address, 0, 1).join().store
        assert isinstance(store, LeaderStore)
        in_parallel((leader.close, store.abandon))
    assert "Traceback" not in capfd.readouterr().err


def test_nothing_is_left_running_after_closing() -> None:
    before = set(threading.enumerate())  # also those of other files' strategies
    with worlds(3):
        pass

    def left() -> list[str]:
        made = set(threading.enumerate()) - before
        return [t.name for t in made if t.name.startswith("allreduce-")]

    wait_until(lambda: not left())


def test_an_interrupt_at_any_call_of_a_wait_stays_a_keyboard_interrupt() -> None:
    """Interrupt the wait after each of its calls in turn, where Python handles signals."""

    def interrupt_after(calls: int) -> bool:
        left = calls

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal left
            if event in ("call", "c_return"):
                left -= 1
                if left == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        try:
            sys.setprofile(count)
            store.get("absent", 0.05)
        except TimeoutError:
            return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        raise AssertionError("nobody has set it")

    with worlds(1) as (world,):
        store = world.store
        gc.disable()  # finalizers are calls, too, out of which no exception comes
        try:
            assert interrupt_after(1)
            assert not interrupt_after(10_000)
            assert next(n for n in range(1, 1000) if not interrupt_after(n)) > 10
        finally:
            gc.enable()
