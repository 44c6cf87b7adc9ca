"""Members that make groups in orders that cannot work, or do not come to one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allreduce.cluster import SilentError
from allreduce.cluster.base import LocalStore, Member
from allreduce.comm.gathering import Gathering, _Failed
from allreduce.comm.gathering_failures import too_late
from allreduce.comm.gathering_notes import Failure, Note, Wanted
from allreduce.errors import MismatchError
from tests.harness import run_ranks, world_of_one


def _orders() -> None:
    import json
    import time

    import allreduce as ar

    comm = ar.init(timeout=20)
    size, rank = comm.size, comm.rank
    half = comm.split(0, -rank)  # member 0 is rank 2
    assert half is not None

    def attempt(parent: ar.Communicator, ranks: list[int], over: str | None = None) -> None:
        comm.barrier()
        began = time.monotonic()
        try:
            made = parent.group(ranks, transport=over)
            told: object = None if made is None else made.all_gather_object(rank)
        except ar.AllreduceError as error:
            told = f"{type(error).__name__} {error}"
        print(json.dumps([told, time.monotonic() - began]))

    reverse = [[0, 1], [1, 0], [1, 2]][rank]
    attempt(comm, reverse)
    attempt(comm, [0, 1])  # and they may go on
    attempt(comm, sorted([rank, (rank + 1) % size]))
    attempt(comm, [[0, 1], [2, 1, 0], [0, 1, 2]][rank])
    attempt(half, [half.rank, 0] if half.rank else [0, 1])
    attempt(comm, [0, 1, 2], [None, None, "tcp"][rank])
    attempt(comm, [0, 1, 2])
    comm.barrier()


def test_of_two_circles_found_at_once_the_other_is_not_raised_later() -> None:
    gathering = Gathering(world_of_one(), "test", 1, lambda: None)
    wanted = Wanted("group", 1, (0, 1), None, "here", 1)
    gathering._leave(wanted, Failure("mismatch", "0 and 1", ((0, 1), (1, 1))))
    gathering._raise_new(Note(failure=Failure("mismatch", "1 and 2", ((1, 1), (2, 1)))))
    with pytest.raises(_Failed):
        gathering._raise_new(Note(failure=Failure("mismatch", "later", ((1, 2), (2, 2)))))


class _MeetsMeanwhile(LocalStore):
    """Where member 1, when it is asked whether all have come to its group, is in it already."""

    def get(self, key: str, timeout: float) -> bytes:
        if "/group.1/1,0/" in key:
            self.set("1/gathering/test/waits/1", Note().pack())
        return super().get(key, timeout)


@pytest.mark.parametrize("store", [LocalStore(), _MeetsMeanwhile()])
def test_who_waits_no_more_is_in_no_circle(store: LocalStore) -> None:
    two = tuple(Member(rank, "host", 1) for rank in range(2))
    world = replace(world_of_one(), size=2, members=two, store=store)
    mine, other = (Wanted("group", 1, ranks, None, "here", 1) for ranks in ((0, 1), (1, 0)))
    store.set("1/gathering/test/waits/1", Note(other).pack())
    gathering = Gathering(world, "test", 1, lambda: None)
    circle = pytest.raises(_Failed) if type(store) is LocalStore else contextlib.nullcontext()
    with circle:
        gathering._look(mine, [1])


class _SilentMeanwhile(LocalStore):
    """Whose keeper is busy while it is asked who has come."""

    def look(self, key: str, patience: float, timeout: float = 0.0) -> bytes | None:
        if key.endswith(("/0", "/1")) and "/waits/" not in key:
            raise SilentError
        return super().look(key, patience, timeout)


def test_who_may_have_come_is_in_no_circle() -> None:
    two = tuple(Member(rank, "host", 1) for rank in range(2))
    world = replace(world_of_one(), size=2, members=two, store=_SilentMeanwhile())
    same = Wanted("group", 1, (0, 1), None, "here", 1)
    world.store.set("1/gathering/test/waits/1", Note(same).pack())
    Gathering(world, "test", 1, lambda: None)._look(same, [1])


class _OfThree(LocalStore):
    """Three members', that keeps what only one of them has forgotten."""

    def forget(self, prefix: str, ranks: Sequence[int]) -> None:
        pass


def test_members_that_try_again_at_once_all_learn_of_each_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allreduce.comm.gathering._PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr("allreduce.comm.gathering._LOOK_SECONDS", 0.1)
    three = tuple(Member(rank, "host", 1) for rank in range(3))
    world = replace(world_of_one(), size=3, members=three, store=_OfThree())

    def member(rank: int) -> int:
        gathering = Gathering(replace(world, rank=rank), "test", 5, lambda: None)
        order = [2, 1, 0] if rank == 0 else [0, 1, 2]
        for _ in range(5):
            with pytest.raises(MismatchError, match="name the ranks of a group in the same order"):
                gathering.meet("here", "group", 1, order, None)
        gathering.meet("here", "group", 1, [0, 1, 2], None)
        return rank

    with ThreadPoolExecutor(3) as members:
        assert list(members.map(member, range(3))) == [0, 1, 2]


def test_members_that_wait_for_each_other_in_different_groups_all_learn_of_it() -> None:
    results = run_ranks(_orders, 3)
    assert [result.returncode for result in results] == [0, 0, 0], results
    by_rank = [[json.loads(line) for line in result.stdout.splitlines()] for result in results]
    assert all(seconds < 5 for told in by_rank for _, seconds in told), by_rank
    reverse, right, ring, third, nested, over, last = (
        [told[scene][0] for told in by_rank] for scene in range(7)
    )
    for rank in range(3):  # rank 2 waits for one that waits for ever
        where = f"MismatchError [shared] rank {rank}: groups differ: "
        _check(reverse[rank], where, "rank 0 waits in group([0, 1]) at ", " for rank 1")
        _check(reverse[rank], "rank 1 waits in group([1, 0]) at ", "program.py:", "the same order")
        _check(ring[rank], where, "group([0, 1])", "group([1, 2])", "group([0, 2])")
        _check(ring[rank], "every rank must make its groups in the same order")
        # With rank 0 or with rank 2: either circle may be found first.
        _check(third[rank], where, "rank 1 waits in group([2, 1, 0])")
        _check(over[rank], where, "makes group([0, 1, 2]) at ", "but rank 2 makes group([0, 1")
        _check(over[rank], ", transport='tcp') at ", "name the same transport on all of them")
    assert right == [[0, 1], [0, 1], None]
    assert last == [[0, 1, 2]] * 3
    assert nested[0] is None or "MismatchError" in nested[0], nested
    _check(nested[1], "world.1/split.1: rank 1", "rank 2 (member 0) waits in group([0, 1]) at ")
    _check(nested[2], "world.1/split.1: rank 2 (member 0)", "rank 1 waits in group([1, 0]) at ")


def _late() -> None:
    import time

    import allreduce as ar
    from allreduce.cluster import waiting
    from allreduce.comm import world

    waiting.WARN_SECONDS = 0.3
    world()  # however late the other is started
    comm = ar.init(timeout=0.8)
    if comm.rank == 1:
        time.sleep(1.1)
    for _ in range(2):  # the second time, both come
        try:
            part = comm.group([0, 1])
            assert part is not None
            print(part.all_reduce(1))
        except ar.TimeoutError as error:
            print(error)
            time.sleep(0.6)
    comm.barrier()


def test_a_member_that_does_not_come_is_named() -> None:
    results = run_ranks(_late, 2)
    assert [result.returncode for result in results] == [0, 0], results
    first, second = (result.stdout.splitlines() for result in results)
    _check(
        first[0],
        "[shared] rank 0: gave up group([0, 1]) at ",
        "program.py:",
        " after 0.8 s: rank 1",
    )
    _check(first[0], "(process ", " is alive) did not come; all of these ranks have to make it")
    _check(second[0], "[shared] rank 1: rank 0 gave up group([0, 1]) at ", "did not come")
    assert first[1] == second[1] == "2"
    _check(results[0].stderr, "waiting for rank 1 (process ", " is alive) in group([0, 1]) at ")


def _busy() -> None:
    import os
    import signal
    import subprocess

    import allreduce as ar
    from allreduce.cluster import client, waiting

    comm = ar.init(timeout=20)
    client._ANSWER_MARGIN, waiting.WARN_SECONDS = 0.1, 1.0
    if comm.rank == 0:  # who has the leader here
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    part = comm.group([0, 1])
    assert part is not None
    part.barrier()


def test_who_keeps_the_store_may_come_late() -> None:
    results = run_ranks(_busy, 2)
    assert [result.returncode for result in results] == [0, 0], results
    _check(results[1].stderr, "waiting for rank 0 (process ", " is stopped, by a signal", "group(")


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        ("is alive", "if it only needs longer, raise the timeout"),
        ("is stopped, by a debugger", "resume what is stopped: a longer timeout would not help"),
    ],
)
def test_what_helps_depends_on_the_state_of_who_does_not_come(state: str, remedy: str) -> None:
    wanted = Wanted("group", 1, (0, 1), None, "here", 1)
    failure = too_late(world_of_one(), wanted, f"rank 1 (process 7 {state})", 2)
    assert failure.story.endswith(f"; {remedy}")


def _leaves(transport: str, leaver: int) -> None:
    import json
    import os
    import time
    from collections.abc import Callable

    if transport == "hierarchical":
        os.environ["ALLREDUCE_HOST"] = f"host{int(os.environ['ALLREDUCE_RANK']) // 2}"
    import allreduce as ar

    comm = ar.init(transport=transport, timeout=20)
    half = comm.split(0)
    assert half is not None

    def attempt(make: Callable[[], ar.Communicator | None]) -> None:
        began = time.monotonic()
        try:
            made = make()
            assert made is not None
            told = made.all_gather_object(comm.rank)
        except ar.PeerLostError as error:
            told = str(error)
        print(json.dumps([told, time.monotonic() - began]))

    others = [rank for rank in range(3) if rank != leaver]
    if comm.rank == leaver:
        half.close()
    else:
        attempt(lambda: half.group([0, 1, 2]))
        attempt(lambda: half.group(others))  # and they may go on
        if transport == "shared":
            attempt(lambda: half.local)
    comm.barrier()
    if comm.rank != leaver:  # the other's program ends
        attempt(lambda: comm.group([leaver, comm.rank]))
        attempt(lambda: comm.group(others))


@pytest.mark.parametrize(("transport", "leaver"), [("shared", 2), ("tcp", 0), ("hierarchical", 0)])
def test_a_member_that_has_left_is_not_waited_for(transport: str, leaver: int) -> None:
    results = run_ranks(_leaves, 3, arguments=(transport, leaver))
    assert [result.returncode for result in results] == [0, 0, 0], results
    others = [rank for rank in range(3) if rank != leaver]
    for rank in others:
        told = [json.loads(line) for line in results[rank].stdout.splitlines()]
        assert all(seconds < 5 for _, seconds in told), told
        closed, right, *local, ended, last = (what for what, _ in told)
        assert right == last == others
        who = f": rank {leaver} (process "
        left = "left normally, by close() or the end of its program, before it came to "
        _check(closed, f"world.1/split.1: rank {rank}{who}", left, "group([0, 1, 2]) at")
        for one in local:
            _check(one, who, left, "local, of ranks [0, 1, 2], at ", "program.py:")
        _check(ended, f"[{transport}] rank {rank}{who}", left, f"group([{leaver}, {rank}]) at ")


def _ends(how: str, transport: str, leaver: int) -> None:
    import os
    import signal
    import threading
    import time

    if transport == "hierarchical":
        os.environ["ALLREDUCE_HOST"] = f"host{int(os.environ['ALLREDUCE_RANK']) // 2}"
    import allreduce as ar

    comm = ar.init(transport=transport, timeout=20)
    comm.barrier()
    if comm.rank == leaver:
        time.sleep(0.4)
        if how == "raises":
            raise ValueError("no data")
        if how == "aborts":
            comm.abort("no data")
            time.sleep(3)
        elif how == "interrupted":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                comm.group([0, 1, 2])
            except KeyboardInterrupt:  # and goes on
                time.sleep(3)
        else:
            comm.group([1, 2, 0])  # and what that raises
        return
    if how == "interrupted":
        time.sleep(0.9)
    began = time.monotonic()
    try:
        comm.group([0, 1, 2])
    except ar.AllreduceError as error:
        print(time.monotonic() - began < 2.5, type(error).__name__, error, flush=True)
    if comm.rank == 0:  # who hosts what tells the other
        time.sleep(1)


@pytest.mark.parametrize(
    ("how", "transport", "leaver"),
    [
        ("raises", "shared", 1),
        ("raises", "tcp", 0),
        ("raises", "hierarchical", 0),
        ("aborts", "shared", 1),
        ("aborts", "tcp", 1),
        ("differs", "shared", 1),
        ("interrupted", "hierarchical", 0),
    ],
)
def test_why_a_member_does_not_come_is_told(how: str, transport: str, leaver: int) -> None:
    results = run_ranks(_ends, 3, arguments=(how, transport, leaver))
    for rank in {0, 1, 2} - {leaver}:
        said = results[rank].stdout
        assert said.startswith("True "), results
        _check(said, f"[{transport}] rank {rank}: ")
        if how == "differs":
            _check(said, "MismatchError", "groups differ: ", "group([1, 2, 0])", "group([0, 1, 2])")
        elif how == "interrupted":
            _check(
                said,
                "PeerLostError",
                f"rank {leaver} left group([0, 1, 2]) at ",
                "KeyboardInterrupt",
            )
        else:
            _check(said, "PeerLostError", f"rank {leaver} aborted the communicator: ", "no data")


def _dies_while_a_group_is_made(transport: str, folder: str) -> None:
    import os
    import time
    from pathlib import Path

    os.environ["ALLREDUCE_HOST"] = f"host{int(os.environ['ALLREDUCE_RANK']) // 2}"
    import allreduce as ar
    from allreduce.comm.shared import opener
    from allreduce.comm.tcp.calling import Calling

    comm = ar.init(transport=transport)
    if comm.rank == 1:  # they have met, and begin to connect, or to share memory
        owner, name = (Calling, "start") if transport == "tcp" else (opener, "_agree")
        setattr(owner, name, lambda *_: os._exit(9))
    began = time.monotonic()
    try:
        comm.split(0)
    except ar.PeerLostError as error:
        print(time.monotonic() - began < 1.5, error, flush=True)
    told = Path(folder) / "told"
    while comm.rank == 0 and not told.exists():  # which hosts what tells the other
        assert time.monotonic() - began < 5, "the other is not told"
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


def test_hosts_are_named_where_local_and_across_wait_for_each_other() -> None:
    def program() -> None:
        import os

        os.environ["ALLREDUCE_HOST"] = f"host{int(os.environ['ALLREDUCE_RANK']) // 2}"
        import allreduce as ar

        comm = ar.init(timeout=20)
        try:
            _ = comm.local if comm.rank in (0, 3) else comm.across
        except ar.MismatchError as error:
            print(error)
        part = comm.split(0)
        assert part is not None
        try:
            part.all_reduce(1 if comm.rank else 1.0)
        except ar.MismatchError as error:
            print(error)
        comm.barrier()

    for rank, result in enumerate(run_ranks(program, 4, env={"ALLREDUCE_TCP_INTERFACE": "lo"})):
        assert result.returncode == 0, result
        _check(result.stdout, f"[hierarchical] rank {rank}: groups differ: ")
        _check(result.stdout, f"[hierarchical] world.1/split.1: rank {rank}: call #0 differs")
        _check(result.stdout, "waits in local, of ranks [0, 1], at ", "in across, of ranks [1, 3],")


def _check(told: Any, *parts: str) -> None:
    for part in parts:
        assert part in told, told
