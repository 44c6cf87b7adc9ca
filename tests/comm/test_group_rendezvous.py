"""Members that make groups in orders that cannot work, or do not come to one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks


def _orders() -> None:
    import json

    import allreduce as ar

    comm = ar.init()
    rank = comm.rank
    half = comm.split(0, -rank)  # member 0 is rank 2
    assert half is not None

    def attempt(
        parent: ar.Communicator, ranks: list[int], over: str | None = None, seconds: float = 25
    ) -> None:
        comm.barrier()
        parent._groups._timeout = seconds
        try:
            made = parent.group(ranks, transport=over)
            told: object = None if made is None else made.all_gather_object(rank)
        except ar.AllreduceError as error:
            told = f"{type(error).__name__} {error}"
        print(json.dumps(told))

    attempt(comm, [[0, 1], [1, 0], [1, 2]][rank], seconds=2)
    attempt(comm, [0, 1])  # and they may go on
    attempt(comm, [1, 2])
    attempt(half, [half.rank, 0] if half.rank else [0, 1], seconds=2)
    attempt(comm, [0, 1, 2], [None, None, "tcp"][rank])
    attempt(comm, [0, 1, 2])
    comm.barrier()


def test_members_that_wait_in_different_groups_name_who_does_not_come() -> None:
    results = run_ranks(_orders, 3)
    assert [result.returncode for result in results] == [0, 0, 0], results
    by_rank = [[json.loads(line) for line in result.stdout.splitlines()] for result in results]
    crossed, right, other, nested, over, last = (
        [told[scene] for told in by_rank] for scene in range(6)
    )
    for rank, (ranks, absent) in enumerate((("[0, 1]", 1), ("[1, 0]", 0), ("[1, 2]", 1))):
        _check(crossed[rank], f"TimeoutError [shared] rank {rank}: gave up group({ranks}) at ")
        _check(crossed[rank], "program.py:", f" after 2 s: rank {absent} (process ")
        _check(crossed[rank], " is alive) did not come; all of these ranks have to make it, in ")
        _check(over[rank], f"MismatchError [shared] rank {rank}: ", "makes group([0, 1, 2]) at ")
        _check(over[rank], "but rank 2 with transport='tcp'; name the same on all of them")
    assert right == [[0, 1], [0, 1], None]
    assert other == [None, [1, 2], [1, 2]]
    assert last == [[0, 1, 2]] * 3
    # Rank 0 is member 2 there, and waits for rank 2 to make their group.
    _check(nested[0], "TimeoutError", "rank 0 (member 2): gave up group([2, 0]) at ", "rank 2 (mem")
    _check(nested[1], "TimeoutError", "world.1/split.1: rank 1: gave up group([1, 0]) at ")
    _check(nested[2], "world.1/split.1: rank 2 (member 0): gave up group([0, 1]) at ", "rank 1 (")


def _late() -> None:
    import allreduce as ar
    from allreduce.cluster.host import waiting
    from allreduce.comm import world
    from tests.harness import shorten

    waiting.WARN_SECONDS = 0.3
    comm = ar.init()
    if comm.rank == 0:
        shorten(comm, 0.8)
        try:
            comm.group([0, 1])
        except ar.TimeoutError as error:
            print(error)
        shorten(comm, 25)
        world().store.set("gave up", b"")
    else:
        world().store.get("gave up", 25)
    part = comm.group([0, 1])  # which rank 0 gave up: rank 1 makes the next one
    assert part is not None
    print(part.all_reduce(1))
    comm.barrier()


def test_a_member_that_does_not_come_is_named() -> None:
    results = run_ranks(_late, 2)
    assert [result.returncode for result in results] == [0, 0], results
    told, *first = results[0].stdout.splitlines()
    _check(
        told, "[shared] rank 0: gave up group([0, 1]) at ", "program.py:", " after 0.8 s: rank 1"
    )
    _check(told, "rank 1 (process ", " is alive) did not come; all of these ranks have to make it")
    _check(told, "; if it only needs longer, raise the timeout")
    assert first == results[1].stdout.splitlines() == ["2"]
    _check(results[0].stderr, "waiting for rank 1 (process ", " is alive) in group([0, 1]) at ")


def _stopped() -> None:
    import os
    import signal

    import allreduce as ar
    from tests.harness import shorten, until_stopped

    comm = ar.init()
    pid = comm.all_gather_object(os.getpid())[1]
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    until_stopped(pid)
    shorten(comm, 1)
    try:
        comm.group([0, 1])
    except ar.TimeoutError as error:
        print(error)
    os.kill(pid, signal.SIGCONT)


def test_a_member_that_is_stopped_is_said_to_be() -> None:
    first, _ = run_ranks(_stopped, 2)
    _check(first.stdout, "rank 1 (process ", " is stopped, by a signal")
    _check(first.stdout, "; resume what is stopped: a longer timeout would not help")


def _busy() -> None:
    import os
    import signal
    import subprocess

    import allreduce as ar
    from allreduce.cluster.host import waiting
    from allreduce.cluster.leader import client
    from tests.harness import until_stopped

    comm = ar.init()
    pid = comm.all_gather_object(os.getpid())[0]
    client._ANSWER_MARGIN, waiting.WARN_SECONDS = 0.1, 1.0
    if comm.rank == 0:  # who has the leader here
        subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
    else:
        until_stopped(pid)
    part = comm.group([0, 1])
    assert part is not None
    part.barrier()


def test_who_keeps_the_store_may_come_late() -> None:
    results = run_ranks(_busy, 2)
    assert [result.returncode for result in results] == [0, 0], results
    _check(results[1].stderr, "waiting for rank 0 (process ", " is stopped, by a signal", "group(")


def _ends(how: str, transport: str, leaver: int, folder: str) -> None:
    import os
    import signal
    import threading
    import time
    from pathlib import Path

    if transport == "hierarchical":
        os.environ["ALLREDUCE_HOST"] = f"host{int(os.environ['ALLREDUCE_RANK']) // 2}"
    import allreduce as ar

    comm = ar.init(transport=transport, timeout=50)
    left, told = Path(folder, "left"), [Path(folder, f"told.{rank}") for rank in range(3)]
    comm.barrier()
    if comm.rank == leaver:
        time.sleep(0.4)
        if how == "raises":
            raise ValueError("no data")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "aborts":
            comm.abort("no data")
            time.sleep(3)
        else:
            try:
                threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
                comm.group([0, 1, 2])
            except KeyboardInterrupt:  # and goes on
                left.touch()
                time.sleep(3)
        return
    began = time.monotonic()
    while how == "interrupted" and not left.exists():
        assert time.monotonic() - began < 25, "the first one is not interrupted"
        time.sleep(0.01)
    began = time.monotonic()
    try:
        comm.group([0, 1, 2])
    except ar.AllreduceError as error:
        print(time.monotonic() - began < 25, type(error).__name__, error, flush=True)
    told[comm.rank].touch()
    (other,) = (told[rank] for rank in range(3) if rank not in (leaver, comm.rank))
    while comm.rank == 0 and not other.exists():  # which hosts what tells the other
        assert time.monotonic() - began < 50, "the other is not told"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("how", "transport", "leaver"),
    [
        ("raises", "shared", 1),
        ("raises", "tcp", 0),
        ("raises", "hierarchical", 0),
        ("dies", "shared", 1),
        ("dies", "tcp", 1),
        ("aborts", "shared", 1),
        ("aborts", "tcp", 1),
        ("interrupted", "hierarchical", 0),
    ],
)
def test_why_a_member_does_not_come_is_told(
    how: str, transport: str, leaver: int, tmp_path: Path
) -> None:
    results = run_ranks(_ends, 3, arguments=(how, transport, leaver, str(tmp_path)))
    for rank in {0, 1, 2} - {leaver}:
        said = results[rank].stdout
        assert said.startswith("True "), results
        _check(said, "PeerLostError [", f"] rank {rank}: ")
        if how == "interrupted":
            _check(
                said,
                "PeerLostError",
                f"rank {leaver} left group([0, 1, 2]) at ",
                "KeyboardInterrupt",
            )
        elif how == "dies":
            _check(said, "PeerLostError", f"rank {leaver} (process ")
        else:
            _check(said, "PeerLostError", f"rank {leaver} aborted the communicator: ", "no data")


def _dies_while_a_group_is_made(transport: str, folder: str) -> None:
    import os
    import time
    from pathlib import Path

    os.environ["ALLREDUCE_HOST"] = f"host{int(os.environ['ALLREDUCE_RANK']) // 2}"
    import allreduce as ar
    from allreduce.comm.transports.shared import opener
    from allreduce.comm.transports.tcp.connections import Dialer

    comm = ar.init(transport=transport)
    if comm.rank == 1:  # they have met, and begin to connect, or to share memory
        owner, name = (Dialer, "start") if transport == "tcp" else (opener, "_agree")
        setattr(owner, name, lambda *_: os._exit(9))
    began = time.monotonic()
    try:
        comm.split(0)
    except ar.PeerLostError as error:
        print(time.monotonic() - began < 25, error, flush=True)
    told = Path(folder) / "told"
    while comm.rank == 0 and not told.exists():  # which hosts what tells the other
        assert time.monotonic() - began < 30, "the other is not told"
        time.sleep(0.01)
    told.touch()
    os._exit(0)


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
def test_a_rank_that_dies_while_a_group_is_made_is_named_by_all(
    transport: str, tmp_path: Path
) -> None:
    results = run_ranks(
        _dies_while_a_group_is_made,
        3,
        env={"ALLREDUCE_TCP_INTERFACE": "lo"},
        arguments=(transport, str(tmp_path)),
    )
    for rank in (0, 2):
        assert results[rank].stdout.startswith("True "), results
        assert "rank 1 (process" in results[rank].stdout, results


def _check(told: Any, *parts: str) -> None:
    for part in parts:
        assert part in told, told
