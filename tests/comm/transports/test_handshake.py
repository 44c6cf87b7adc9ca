"""Processes connect only within their own job, and report failures."""

from __future__ import annotations

import os
import random
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from allreduce import errors
from allreduce.cluster.store import LocalStore
from allreduce.cluster.world import Member, World
from allreduce.comm.transports import handshake
from allreduce.comm.transports.handshake import Credentials, HandshakeError, answer, call
from allreduce.comm.transports.shared import rendezvous
from allreduce.comm.transports.shared.links import PROCESS_BYTES, Links, Process
from allreduce.comm.transports.shared.rendezvous import connect
from tests.harness import run_ranks

MEETING = Credentials("job", "1/comm/world", b"secret")
PROCESS = Process(1, 4711, 2)
HEAD = struct.pack("!16sI", b"allreduce job le", handshake.VERSION)


def shake(caller: Credentials, listener: Credentials) -> list[Any]:
    """Let two ends shake hands; return both results or errors."""
    ends = socket.socketpair()
    outcomes: list[Any] = [None, None]

    def side(index: int, function: Callable[..., Any], *arguments: Any) -> None:
        ends[index].settimeout(25)
        try:
            outcomes[index] = function(ends[index], *arguments)
        except (HandshakeError, OSError) as error:
            outcomes[index] = error
            ends[index].close()

    threads = [
        threading.Thread(target=side, args=(0, call, caller, PROCESS.pack())),
        threading.Thread(target=side, args=(1, answer, listener, PROCESS_BYTES)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    for end in ends:
        end.close()
    return outcomes


def test_members_of_one_job_recognise_each_other() -> None:
    called, answered = shake(MEETING, MEETING)
    assert called is None
    assert Process.unpack(answered) == PROCESS


@pytest.mark.parametrize("changed", [{"secret": b"other"}, {"job": "other"}, {"name": "other"}])
def test_strangers_are_refused_by_both(changed: dict[str, Any]) -> None:
    called, answered = shake(replace(MEETING, **changed), MEETING)
    assert isinstance(called, HandshakeError)
    assert "does not know the job's secret" in str(called)
    assert isinstance(answered, HandshakeError | OSError)


def fuzz(seed: int, rounds: int) -> None:
    """Meet a stranger who changes bits of what a member says, as its caller and its listener."""
    draw = random.Random(seed)
    for _ in range(rounds):
        said = bytearray(HEAD + draw.randbytes(32) + PROCESS.pack() + draw.randbytes(32))
        for _ in range(draw.randrange(4)):
            said[draw.randrange(len(said))] ^= 1 << draw.randrange(8)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(said[: draw.choice((len(said), draw.randrange(len(said))))])
            theirs.shutdown(socket.SHUT_WR)
            answers = partial(answer, ours, MEETING, PROCESS_BYTES)
            calls = partial(call, ours, MEETING, PROCESS.pack())
            with pytest.raises(HandshakeError):
                draw.choice((answers, calls))()


def test_mutated_handshakes_are_refused() -> None:
    fuzz(20264, 1000)


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_mutated_handshakes_are_refused_for_long() -> None:
    fuzz(20265, 100_000)


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.0\r\n\r\n", b"noise " * 33, b"\0" * 52])
def test_noise_is_refused(noise: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(25)
        left.sendall(noise)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError):
            answer(right, MEETING, PROCESS_BYTES)


class Elsewhere(LocalStore):
    """A store with addresses without listeners, as if they were on another host."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        value = self._store.get(key, timeout)
        return b"nobody-" + value if key.endswith("/address") else value


def worlds(
    size: int, far: int | None = None, secrets: dict[int, bytes] | None = None
) -> list[World]:
    store = LocalStore()
    members = tuple(Member(rank, f"host{rank}", os.getpid()) for rank in range(size))
    job = os.urandom(8).hex()
    return [
        World(
            *(1, rank, size, members, "leader", "a test's", job),
            (secrets or {}).get(rank, b"secret"),
            Elsewhere(store) if rank == far else store,
        )
        for rank in range(size)
    ]


def meet(
    ranks: list[World], timeout: float = 60, intrude: Callable[[str], None] | None = None
) -> list[Any]:
    """Let all ranks connect, each in a thread; return their links or errors."""
    outcomes: list[Any] = [None] * len(ranks)

    def run(world: World) -> None:
        try:
            if intrude is not None and world.rank == 1:
                intrude(world.store.get("1/comm/meeting/address", 25).decode())
            outcomes[world.rank] = connect(world, "meeting", world.rank + 1, timeout)
        except Exception as error:
            outcomes[world.rank] = error

    threads = [threading.Thread(target=run, args=(world,)) for world in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 25)
    return outcomes


def close(outcomes: list[Any]) -> None:
    for links in outcomes:
        if isinstance(links, Links):
            links.close()


def test_everybody_is_linked_with_everybody() -> None:
    outcomes = meet(worlds(4))
    for rank, links in enumerate(outcomes):
        assert sorted(links.sockets) == [other for other in range(4) if other != rank]
        assert [process.local_members for process in links.processes] == [1, 2, 3, 4]
    for low in range(4):
        for high in range(low + 1, 4):
            outcomes[low].sockets[high].sendall(bytes([low, high]))
            assert outcomes[high].sockets[low].recv(2) == bytes([low, high])
    outcomes[2].close()
    assert outcomes[1].sockets[2].recv(1) == b""  # an end of file
    close(outcomes)


def test_ranks_on_another_host_are_named_with_both_hosts_by_all() -> None:
    for outcome in meet(worlds(3, far=2)):
        assert isinstance(outcome, errors.UnsupportedError)
        assert "rank 2 on host2 cannot reach rank 0 on host0" in str(outcome)


def test_ranks_of_different_builds_are_named_with_both_layouts_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts = [0xA, 0xB, 0xA]

    class Native:
        @property
        def LAYOUT(self) -> int:  # noqa: N802  # as the module's
            return layouts.pop()

    monkeypatch.setattr(rendezvous, "_native", Native())
    for outcome in meet(worlds(3)):
        assert isinstance(outcome, errors.JoinError)
        text = r"rank 0 and rank [12] run different builds .* (a and b|b and a); install the same"
        assert re.search(text, str(outcome)), outcome


def test_a_stranger_at_the_door_is_dropped_and_the_ranks_still_meet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def intrude(address: str) -> None:
        for noise in (b"", b"x" * 100):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(f"\0{address}")
            stranger.sendall(noise)
            stranger.close()

    outcomes = meet(worlds(3), intrude=intrude)
    assert all(isinstance(outcome, Links) for outcome in outcomes), outcomes
    close(outcomes)


def test_a_rank_with_another_secret_is_refused_and_waited_for_no_longer_than_the_timeout() -> None:
    start = time.monotonic()
    first, second = meet(worlds(2, secrets={1: b"wrong"}), timeout=4)
    assert isinstance(second, errors.JoinError)
    assert "does not know the job's secret" in str(second)
    assert isinstance(first, errors.TimeoutError)
    assert time.monotonic() - start < 29


def test_ranks_that_do_not_come_are_named() -> None:
    outcomes = meet(worlds(3)[:2], timeout=2)
    for outcome in outcomes:
        assert isinstance(outcome, errors.TimeoutError)
        assert "rank 2" in str(outcome)


def _dies_when_it_should_prove_itself() -> None:
    import os
    import signal

    from allreduce import errors
    from allreduce.comm import init
    from allreduce.comm.transports import handshake

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["ALLREDUCE_RANK"] == "2":
        handshake.call = die  # type: ignore[assignment]
    try:
        init()
    except errors.PeerLostError as error:
        print(error)


def test_a_rank_that_dies_while_all_meet_is_named_by_the_others() -> None:
    results = run_ranks(_dies_when_it_should_prove_itself, 3)
    for result in results[:2]:
        assert "rank 2 (process" in result.stdout, results


def _is_held_up() -> None:
    import os
    import time

    from allreduce.comm import init
    from allreduce.comm.transports import handshake

    prove = handshake.call

    def late(*given: object) -> None:
        time.sleep(3)
        prove(*given)  # type: ignore[arg-type]

    if os.environ["ALLREDUCE_RANK"] == "1":
        handshake.call = late  # type: ignore[assignment]
    print(init().all_reduce(1))


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_rank_that_is_held_up_before_it_proves_itself_joins(transport: str) -> None:
    results = run_ranks(_is_held_up, 2, env={"ALLREDUCE_TRANSPORT": transport})
    assert [result.stdout for result in results] == ["2\n"] * 2, results


def test_a_file_that_comes_with_half_a_message_is_closed() -> None:
    here, there = socket.socketpair()
    links = Links(1, sockets={0: here})
    with here, there:
        before = set(os.listdir("/proc/self/fd"))
        socket.send_fds(there, [b"\0\0\0"], [there.fileno()])
        with pytest.raises(ConnectionResetError, match="rank 0 died"):
            links.pass_file(None, 0, time.monotonic() + 5)
        assert set(os.listdir("/proc/self/fd")) == before


def test_a_socket_that_finds_no_free_descriptor_is_told_from_the_senders_end() -> None:
    near, far = socket.socketpair()
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    with near, far, open(os.devnull) as file:
        socket.send_fds(far, [rendezvous._PAIR.pack(2)], [file.fileno()])
        with open(os.devnull) as lowest_free:
            limit = lowest_free.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, kept[1]))
        try:
            with pytest.raises(
                HandshakeError, match=r"no free file descriptor .* to rank 2; raise"
            ):
                rendezvous._receive_pair(Links(1), near)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, kept)
        far.close()
        with pytest.raises(HandshakeError, match="rank 0 ended while it introduced"):
            rendezvous._receive_pair(Links(1), near)
