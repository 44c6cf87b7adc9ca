"""Compound calls: synchronous, not interleaved among threads, and their failures."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator, objects, replica_communicators
from allreduce.comm.core.locks import is_locked
from allreduce.comm.core.transport import FastTransport
from tests.harness import run_ranks, run_threads, world_of_one

TRANSPORTS = pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])


def in_thread(call: Callable[[], Any], said: list[Any]) -> threading.Thread:
    """Make a call in a thread, whose result or error is appended to a list."""

    def run() -> None:
        try:
            said.append(call())
        except errors.AllreduceError as error:
            said.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def until_in_a_compound_call(comm: Communicator) -> None:
    end = time.monotonic() + 25
    while not is_locked(comm._dispatch.lock):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_they_cannot_be_asynchronous_and_the_error_says_what_to_do() -> None:
    def member(comm: Communicator) -> int:
        x = np.ones(2) if comm.rank == 0 else None
        calls: dict[str, Callable[[], Any]] = {
            r"scatter consists of several calls.*pass out= on all": lambda: comm.scatter(
                x, async_op=True
            ),
            "all_to_all consists.*in another thread": lambda: comm.all_to_all(
                np.ones(2), counts=[1, 1], async_op=True
            ),
            "broadcast_object.*in another thread": lambda: comm.broadcast_object(1, async_op=True),
            "all_gather_object.*another": lambda: comm.all_gather_object(1, async_op=True),
            "gather_object consists": lambda: comm.gather_object(1, async_op=True),
        }
        for says, call in calls.items():
            with pytest.raises(errors.UnsupportedError, match=says):
                call()
        total: int = comm.all_reduce(1)  # nothing of them has started
        return total

    assert run_threads(member, 2) == [2, 2]


@TRANSPORTS
def test_a_scatter_into_out_is_one_call_and_may_be_asynchronous(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)

    def member(comm: Communicator) -> None:
        whole = np.arange(12.0).reshape(6, 2)
        x = whole if comm.rank == 1 else None
        out = np.zeros((3, 4))[:, ::2]
        work = comm.scatter(x, root=1, out=out, async_op=True)
        assert work.wait() is out
        np.testing.assert_array_equal(out, whole[3 * comm.rank :][:3])
        counts = [5, 1]
        got = comm.scatter(x, root=1, counts=counts, out=np.zeros((counts[comm.rank], 2)))
        np.testing.assert_array_equal(got, np.split(whole, [5])[comm.rank])
        if comm.rank == 0:
            with pytest.raises(errors.ShapeError, match=r"out must have shape \(5, 2\)"):
                comm.scatter(None, root=1, counts=counts, out=np.zeros((4, 2)))
        assert comm.all_reduce(1) == 2

    run_threads(member, 2)


def test_starts_in_another_order_on_each_member_do_not_wait_for_each_other() -> None:
    made = [replica_communicators(world_of_one(), 2, name=f"order{i}", timeout=20) for i in (0, 1)]

    def member(comm: Communicator) -> None:
        works: list[tuple[Any, Any]] = []
        mine = [each[comm.rank] for each in made]
        for one in mine if comm.rank else reversed(mine):
            works.append((one.all_reduce(np.ones(3), async_op=True), [2.0] * 3))
            listed = [np.ones(1), np.ones(1, int)]
            works.append((one.all_reduce(listed, async_op=True), [[2], [2]]))
            x = np.arange(4.0) if comm.rank == 1 else None
            share = one.scatter(x, root=1, out=np.zeros(2), async_op=True)
            works.append((share, np.arange(4.0)[2 * comm.rank :][:2]))
        for work, expected in reversed(works):
            np.testing.assert_array_equal(work.wait(), expected)
            assert work.done()

    try:
        run_threads(member, 2)
    finally:
        for comm in (comm for each in made for comm in each):
            comm.close()


def test_what_cannot_be_carried_is_raised_on_all_members_and_the_rest_goes_on() -> None:
    def member(comm: Communicator) -> None:
        with pytest.raises(errors.UsageError, match=r"carries numbers|has passed data"):
            comm.all_gather_object({1} if comm.rank else 5)
        assert comm.broadcast_object("well") == "well"
        with pytest.raises(errors.UsageError, match="scatter takes an array on its root, but got"):
            comm.scatter([1] if comm.rank == 0 else None)
        assert comm.all_reduce(1) == 2

    run_threads(member, 2)


def test_close_waits_for_the_call_of_another_thread() -> None:
    said: list[Any] = []

    def member(comm: Communicator) -> Any:
        if comm.rank == 1:
            closing.wait(25)
            time.sleep(0.05)
            return comm.all_gather_object(1)
        thread = in_thread(lambda: comm.all_gather_object(0), said)
        until_in_a_compound_call(comm)
        closing.set()
        comm.close()
        thread.join(25)
        return said[0]

    closing = threading.Event()
    comms = replica_communicators(world_of_one(), 2, name="closing", timeout=25)
    assert run_threads(lambda comm: member(comms[comm.rank]), 2) == [[0, 1]] * 2
    comms[1].close()


@TRANSPORTS
def test_a_member_that_does_not_come_is_named(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    given_up = threading.Event()

    def member(comm: Communicator) -> None:
        if comm.rank == 1:
            given_up.wait(25)
            return
        with pytest.raises(errors.TimeoutError, match=r"gave up scatter\(root=0\) #0") as caught:
            comm.scatter(np.ones(2))
        assert "replica 1 (rank 0) has made no call yet" in str(caught.value)
        with pytest.raises(errors.ClosedError):
            comm.all_gather_object(1)
        given_up.set()

    run_threads(member, 2, comm_timeout=0.5)


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
        """Return the threads of the other members with which each thread's calls were paired."""
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


def _forked_in_the_middle() -> None:
    import os
    import threading
    import time
    import warnings

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init
    from allreduce.comm.core.locks import is_locked

    warnings.simplefilter("ignore")
    comm = init()
    comm.all_gather_object(0)  # lazy imports are done: no fork during an import
    if comm.rank == 0:
        said: list[object] = []
        thread = threading.Thread(target=lambda: said.append(comm.all_gather_object(0)))
        thread.start()
        while not is_locked(comm._dispatch.lock):
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            calls = (
                lambda: comm.all_reduce(1),
                lambda: comm.scatter([1.0]),
                lambda: comm.all_reduce([1, 2]),
                lambda: comm.empty(3),
            )
            for attempt in calls:
                try:
                    attempt()
                except errors.UsageError as error:
                    print(type(error).__name__, error, flush=True)
            comm.close()
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
        comm.send(1, dest=1)
        thread.join()
        print(said[0], flush=True)
    else:
        comm.recv(np.zeros((), int))
        time.sleep(0.1)
        print(comm.all_gather_object(1), flush=True)


def test_a_child_made_by_fork_in_the_middle_is_refused_and_disturbs_nothing() -> None:
    first, second = run_ranks(_forked_in_the_middle, 2)
    assert first.stdout.count("was forked from the process that joined") == 4, first
    assert first.stdout.splitlines()[4:] == ["0", "[0, 1]"], first
    assert second.stdout == "[0, 1]\n", second


def test_what_is_no_error_of_ours_between_two_of_the_calls_ends_the_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a signal's handler may raise it: the others would wait for the next call for ever."""
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


def test_what_has_started_is_waited_for_while_another_thread_is_in_such_a_call() -> None:
    over = threading.Event()

    def call(comm: Communicator) -> list[Any]:
        work = comm.all_gather(np.full(1, comm.rank), async_op=True)
        said: list[Any] = []
        if comm.rank == 0:
            thread = in_thread(lambda: comm.broadcast_object(None, root=1), said)
            until_in_a_compound_call(comm)
            got = work.wait().tolist()
            transport = comm._dispatch.transport
            assert isinstance(transport, FastTransport)
            quick = [comm._dispatch.fast_path]  # off: nothing may come in between
            over.set()
            thread.join(25)
            assert [*quick, comm._dispatch.fast_path] == [None, transport.native]
            return [*got, *said]
        over.wait(25)
        return [*work.wait().tolist(), comm.broadcast_object("x", root=1)]

    assert run_threads(call, 2) == [[0, 1, "x"]] * 2


def test_counts_that_do_not_fit_are_refused_before_the_others_hear_of_the_call() -> None:
    def call(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            with pytest.raises(errors.ShapeError, match="3 rows in all, for an array of 2 rows"):
                comm.all_to_all(np.ones(2), counts=[1, 2])
        found: list[float] = comm.all_to_all(np.full(2, comm.rank), counts=[1, 1]).tolist()
        return found

    assert run_threads(call, 2) == [[0, 1], [0, 1]]
