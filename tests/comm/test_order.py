"""Calls made of several: when their stages start, and what becomes of them at an end."""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator, attendant, objects, replica_communicators
from tests.harness import run_ranks, run_threads, settle_threads, world_of_one

TRANSPORTS = pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])


def with_several(number: int, size: int, fn: Callable[[int, list[Communicator]], Any]) -> list[Any]:
    """Call `fn(rank, its members of `number` communicators)` in `size` threads."""
    made = [
        replica_communicators(world_of_one(), size, name=f"order{i}", timeout=10)
        for i in range(number)
    ]
    try:
        return run_threads(lambda comm: fn(comm.rank, [each[comm.rank] for each in made]), size)
    finally:
        for comm in (comm for each in made for comm in each):
            comm.close()


@TRANSPORTS
def test_starts_in_another_order_on_each_member_do_not_wait_for_each_other(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)

    def member(rank: int, comms: list[Communicator]) -> None:
        works: list[tuple[Any, Any]] = []
        for comm in comms if rank else reversed(comms):
            x = np.arange(4.0) if rank == 1 else None
            works.append((comm.scatter(x, root=1, async_op=True), np.arange(4.0)[2 * rank :][:2]))
            works.append((comm.all_reduce(np.ones(3), async_op=True), [2.0] * 3))
            works.append((comm.all_gather_object({"r": rank}, async_op=True), [{"r": 0}, {"r": 1}]))
            works.append((comm.all_to_all(np.ones(2), counts=[1, 1], async_op=True), [1.0, 1.0]))
            works.append((comm.all_reduce(np.ones(3), async_op=True), [2.0] * 3))
        for work, expected in reversed(works):
            assert list(work.wait(8)) == list(expected)
            assert work.done()

    with_several(3, 2, member)


@TRANSPORTS
def test_stages_go_on_where_nobody_waits_for_them(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)

    def member(rank: int, comms: list[Communicator]) -> None:
        work = comms[0].all_gather_object(rank, async_op=True)
        if rank == 1:
            assert work.wait(5) == [0, 1]
        comms[1].barrier()  # in which the other member is meanwhile
        assert work.wait(5) == [0, 1]

    with_several(2, 2, member)
    until = time.monotonic() + 5
    while attendant._thread is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert attendant._thread is None  # there is nothing to attend to


def test_plain_data_may_be_changed_once_its_call_has_started() -> None:
    def member(comm: Communicator) -> None:
        mine: list[Any] = [comm.rank]
        works = [comm.all_gather_object(mine, async_op=True) for _ in range(3)]
        mine.append("changed")
        assert [work.wait() for work in works] == [[[0], [1]]] * 3

    run_threads(member, 2)


def test_what_cannot_be_carried_is_raised_by_the_wait_and_the_rest_goes_on() -> None:
    def member(comm: Communicator) -> None:
        bad = comm.all_gather_object({1} if comm.rank else 5, async_op=True)
        after = comm.broadcast_object("well", async_op=True)
        out = comm.scatter([1] if comm.rank == 0 else None, async_op=True)
        last = comm.all_reduce(1, async_op=True)
        for _ in range(2):
            with pytest.raises(errors.UsageError, match=r"carries numbers|has passed what"):
                bad.wait()
        with pytest.raises(errors.UsageError, match="scatter takes an array on its root, but got"):
            out.wait()
        assert (after.wait(), last.wait()) == ("well", 2)
        with pytest.raises(errors.UsageError):
            bad.done()

    run_threads(member, 2)


def test_close_completes_what_goes_in_stages() -> None:
    def member(comm: Communicator) -> Any:
        work = comm.all_gather_object(comm.rank, async_op=True)
        if comm.rank == 0:
            comm.close()
        return work.wait()

    assert run_threads(member, 2) == [[0, 1]] * 2


@TRANSPORTS
def test_a_member_that_does_not_come_is_named(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    given_up = threading.Event()

    def member(comm: Communicator) -> None:
        if comm.rank == 1:
            given_up.wait(10)
            return
        stages = comm.scatter(np.ones(2), async_op=True)
        plain = comm.all_reduce(np.ones(2), async_op=True)
        with pytest.raises(errors.TimeoutError, match=r"gave up scatter\(root=0\) #0") as caught:
            (stages if transport == "tcp" else plain).wait(timeout=0.3)
        assert "replica 1 (rank 0) has made no call yet" in str(caught.value)
        for work in (stages, plain):
            with pytest.raises((errors.TimeoutError, errors.ClosedError)):
                work.wait()
        given_up.set()

    run_threads(member, 2)


@TRANSPORTS
def test_who_waits_hears_the_cause_and_not_who_only_goes_on(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that goes on with stages is the first to notice."""
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    started: list[Any] = []  # which nobody looks after before all have, as a start may notice, too
    attend = attendant.attend
    monkeypatch.setattr(attendant, "attend", started.append)
    first, both = threading.Event(), threading.Barrier(2)

    def member(comm: Communicator) -> None:
        if comm.rank:
            first.wait(10)
        before = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
        stages = comm.all_gather_object(1, async_op=True)
        first.set()
        both.wait(10)
        for order in started:
            attend(order)
        time.sleep(0.1)
        with pytest.raises(errors.MismatchError):
            before.wait()
        with pytest.raises(errors.ClosedError, match=r"dead since: .* differs"):
            stages.wait()

    run_threads(member, 2)


def test_calls_that_had_to_wait_are_told_with_the_lines_that_made_them() -> None:
    def member(comm: Communicator) -> None:
        first = comm.scatter(np.ones(2) if comm.rank == 0 else None, async_op=True)
        second = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
        first.wait()
        second.wait()

    line = inspect.getsourcelines(member)[1] + 2
    place = f"{os.path.relpath(__file__)}:{line}"
    for error in settle_threads(member, 2):
        assert isinstance(error, errors.MismatchError)
        assert str(error).count(place) == 2, error


@TRANSPORTS
def test_threads_whose_order_differs_get_a_mismatch_and_never_wrong_data(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)

    def member(comm: Communicator) -> bool:
        wrong: list[Any] = []
        caught: list[Exception] = []

        def call(make: Callable[[int], tuple[Any, Any]]) -> None:
            try:
                for i in range(40):
                    got, expected = make(i)
                    if got != expected:
                        wrong.append(got)
            except errors.AllreduceError as error:
                caught.append(error)

        calls: list[Callable[[int], tuple[Any, Any]]] = [
            lambda i: (comm.all_gather_object([comm.rank] * i), [[0] * i, [1] * i]),
            lambda i: (comm.broadcast_object("x" * i), "x" * i),
            lambda i: (comm.all_reduce([i, 0.5]), [2 * i, 1.0]),
            lambda i: (
                comm.scatter(np.arange(2) + i if comm.rank == 0 else None)[0],
                comm.rank + i,
            ),
            lambda i: (float(comm.all_reduce(np.full(3, i))[0]), 2.0 * i),
        ]
        # The last member's threads go the other way: some call meets another of its kind at last.
        threads = [
            threading.Thread(target=call, args=(make,))
            for make in (calls if comm.rank else reversed(calls))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert all(
            isinstance(e, errors.MismatchError | errors.ClosedError | errors.PeerLostError)
            for e in caught
        ), caught
        return any(isinstance(e, errors.MismatchError) for e in caught)

    assert run_threads(member, 2) == [True, True]


@TRANSPORTS
def test_alike_calls_of_threads_are_paired_as_they_come_and_never_torn(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    rounds = 30

    def member(comm: Communicator) -> list[tuple[int, ...]]:
        """Return what every thread's calls were paired with: the threads on the members."""
        pairs: list[tuple[int, ...]] = []

        def call(thread: int) -> None:
            for i in range(rounds):
                mine = [comm.rank, thread, "x" * (i * (1 + 40 * thread))]
                got = comm.all_gather_object(mine)
                assert got[comm.rank] == mine
                assert [one[0] for one in got] == [0, 1]
                assert all(set(one[2]) <= {"x"} for one in got)
                pairs.append(tuple(one[1] for one in got))

        threads = [threading.Thread(target=call, args=(thread,)) for thread in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(pairs)

    first, second = run_threads(member, 2)
    assert len(first) == 2 * rounds
    assert first == second


def _forked_in_a_stage() -> None:
    import os
    import time
    import warnings

    from allreduce import errors
    from allreduce.comm import init

    warnings.simplefilter("ignore")
    comm = init()
    if comm.rank == 0:
        work = comm.all_gather_object(0, async_op=True)
        child = os.fork()
        if child == 0:
            for attempt in (lambda: comm.all_reduce(1), work.wait, lambda: comm.scatter([1.0])):
                try:
                    attempt()
                except errors.UsageError as error:
                    print(type(error).__name__, error, flush=True)
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
        comm.send(1, dest=1)
        print(work.wait(), flush=True)
    else:
        import numpy as np

        comm.recv(np.zeros((), int))
        time.sleep(0.1)
        print(comm.all_gather_object(1), flush=True)


def test_a_child_made_by_fork_in_a_stage_is_refused_and_disturbs_nothing() -> None:
    first, second = run_ranks(_forked_in_a_stage, 2, timeout=20)
    assert first.stdout.count("was forked from the process that joined") == 3, first
    assert first.stdout.splitlines()[3:] == ["0", "[0, 1]"], first
    assert second.stdout == "[0, 1]\n", second


def _ends_in_a_stage() -> None:
    import numpy as np

    from allreduce.comm import init

    comm = init()
    if comm.rank == 0:
        works = [comm.scatter(np.ones(2), async_op=True) for _ in range(20)]
        assert not works[0].done()
    else:
        comm.recv(np.zeros((), int))


def test_a_program_that_ends_in_a_stage_ends_well() -> None:
    first, second = run_ranks(_ends_in_a_stage, 2, timeout=20)
    assert first.returncode == 0, first
    assert "rank 0" in second.stderr
    assert "left normally" in second.stderr


def test_what_is_no_error_of_ours_between_two_stages_ends_the_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a signal's handler may raise it: the others would wait for the next stage for ever."""
    replace = dataclasses.replace

    def interrupted(options: Any, **changes: Any) -> Any:
        if threading.current_thread().name == "first":
            raise RuntimeError("raised by a handler")
        return replace(options, **changes)

    monkeypatch.setattr(objects, "replace", interrupted)

    def call(comm: Communicator) -> str:
        if comm.rank == 0:
            threading.current_thread().name = "first"
            with pytest.raises(RuntimeError, match="raised by a handler"):
                comm.all_gather_object("x")
            with pytest.raises(errors.AllreduceError):
                comm.barrier()
            return "dead"
        with pytest.raises(errors.PeerLostError, match="interrupted by RuntimeError"):
            comm.all_gather_object("y")
        return "told"

    assert run_threads(call, 2) == ["dead", "told"]


def test_what_has_started_is_waited_for_while_another_thread_has_its_turn() -> None:
    def call(comm: Communicator) -> str:
        first = comm.all_gather_object(comm.rank, async_op=True)
        while not first.done():
            time.sleep(0.001)
        taken, over = threading.Event(), threading.Event()

        def hold() -> None:
            with comm._order.lock:
                taken.set()
                over.wait(10)

        holder = threading.Thread(target=hold)
        holder.start()
        taken.wait(10)
        try:
            assert first.done()
            assert first.wait(5) == [0, 1]
            with pytest.raises(errors.TimeoutError, match="another thread of this rank was in"):
                comm._order.reach(None, time.monotonic() + 0.05)
        finally:
            over.set()
            holder.join(10)
        return "ok"

    assert run_threads(call, 2) == ["ok", "ok"]


def test_without_a_thread_more_calls_go_on_where_somebody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attendant.leave()
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "allreduce stages":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)

    def call(comm: Communicator) -> list[Any]:
        work = comm.all_gather_object(comm.rank, async_op=True)
        found: list[Any] = work.wait(10)
        return found

    assert run_threads(call, 2) == [[0, 1], [0, 1]]
    monkeypatch.undo()
    assert attendant._thread is None
    assert run_threads(call, 2) == [[0, 1], [0, 1]]


def test_counts_that_do_not_fit_are_refused_before_the_others_hear_of_the_call() -> None:
    def call(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            with pytest.raises(errors.ShapeError, match="3 rows in all, for an array of 2 rows"):
                comm.all_to_all(np.ones(2), counts=[1, 2], async_op=True)
        found: list[float] = comm.all_to_all(np.full(2, comm.rank), counts=[1, 1]).tolist()
        return found

    assert run_threads(call, 2) == [[0, 1], [0, 1]]


def test_a_wait_keeps_its_time_while_another_thread_waits_for_the_stage_before_it() -> None:
    over = threading.Event()

    def call(comm: Communicator) -> list[Any]:
        said: list[Any] = []
        if comm.rank == 0:
            waiting = threading.Thread(
                target=lambda: said.append(comm.broadcast_object(None, root=1))
            )
            waiting.start()
            queue = comm._order.queue
            while not (queue and queue[0].stage and queue[0].stage.awaited):
                time.sleep(0.001)
            plain = comm.all_reduce(np.ones(3), async_op=True)
            began = time.monotonic()
            with pytest.raises(errors.TimeoutError, match="nothing has ended by this"):
                plain.wait(0.2)
            assert time.monotonic() - began < 2
            over.set()
            waiting.join(10)
            return [*said, *plain.wait(1e10)]
        over.wait(10)
        return [comm.broadcast_object("x", root=1), *comm.all_reduce(np.ones(3))]

    assert run_threads(call, 2) == [["x", 2.0, 2.0, 2.0]] * 2
