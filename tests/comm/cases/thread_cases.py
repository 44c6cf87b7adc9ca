"""Cases of several threads on one communicator, for every transport."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.comm.core.locks import is_locked

Call = Callable[[Communicator, int], None]  # makes a call in a round, and checks its result
_SECONDS = 20


def _data(member: int, n: int) -> dict[str, Any]:
    return {"n": n, "member": member, "pad": "x" * (700 * member + n)}


def _all_gather_object(comm: Communicator, n: int) -> None:
    assert comm.all_gather_object(_data(comm.rank, n)) == [_data(m, n) for m in range(comm.size)]


def _gather_object(comm: Communicator, n: int) -> None:
    got = comm.gather_object(_data(comm.rank, n), root=comm.size - 1)
    assert (got is None) == (comm.rank != comm.size - 1)
    assert got is None or got == [_data(m, n) for m in range(comm.size)]


def _broadcast_object(comm: Communicator, n: int) -> None:
    assert comm.broadcast_object(_data(comm.rank, n)) == _data(0, n)


def _scatter(comm: Communicator, n: int) -> None:
    x = np.arange(3.0 * comm.size) + n if comm.rank == 0 else None
    np.testing.assert_array_equal(comm.scatter(x), np.arange(3.0) + 3 * comm.rank + n)


def _exchange(comm: Communicator, n: int) -> None:
    counts = [(comm.rank + m) % 2 + 1 for m in range(comm.size)]
    got = comm.all_to_all(np.full(sum(counts), comm.rank + n), counts=counts)
    np.testing.assert_array_equal(got, np.repeat(np.arange(comm.size) + n, counts))


def _lists(comm: Communicator, n: int) -> None:
    first, second = comm.all_reduce([np.full(3, n, "f4"), np.full(2, n, "i8")])
    assert (first == n * comm.size).all()
    assert (second == n * comm.size).all()


def _empty(comm: Communicator, n: int) -> None:
    array = comm.empty(1000 + n)
    array[:] = n
    comm.all_reduce(array, op="max", out=array)
    assert (array == n).all()


def _plain(comm: Communicator, n: int) -> None:
    assert (comm.all_reduce(np.full(65, n, "i8")) == n * comm.size).all()


def _started(comm: Communicator, n: int) -> None:
    works = [comm.all_gather(np.full(1, n + i), async_op=True) for i in range(3)]
    for i, work in reversed(list(enumerate(works))):
        assert work.wait(_SECONDS).tolist() == [n + i] * comm.size


COMPOUND: tuple[Call, ...] = (
    *(_all_gather_object, _gather_object, _broadcast_object, _scatter, _exchange),
)
OTHERS: tuple[Call, ...] = (_lists, _empty, _started, *COMPOUND)


def _in_threads(*calls: Callable[[], None]) -> None:
    """Make calls in a thread each; the first error of one is raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def threads_in_order(comm: Communicator) -> None:
    """A compound call is whole, whatever another thread calls in the middle of it.

    All but the last member are in its first part when their other thread calls; it tells the last
    by a message, which has no place in the order.
    """
    last = comm.size - 1

    def after(n: int, second: Call) -> None:
        end = time.monotonic() + _SECONDS
        while comm.rank != last and not is_locked(comm._dispatch.lock):
            assert time.monotonic() < end
            time.sleep(0.0005)
        if comm.rank != last:
            comm.send(np.full(1, n), dest=last, tag=n)
        second(comm, n)

    pairs: list[tuple[Call, Call]] = [
        (first, _plain) for first in COMPOUND
    ]  # of which the native way must know, too
    pairs += zip(itertools.cycle(COMPOUND), OTHERS, strict=False)
    for n, (first, second) in enumerate(pairs):
        if comm.rank == last:
            for _ in range(last):
                assert comm.recv(np.zeros(1, int), tag=n) == n
            first(comm, n)
            second(comm, n)
        else:
            _in_threads(
                lambda first=first, n=n: first(comm, n),  # type: ignore[misc]
                lambda second=second, n=n: after(n, second),  # type: ignore[misc]
            )


def threads_in_turn(comm: Communicator) -> None:
    """Threads that pass a turn on start works in one order, and wait for them side by side."""
    rounds = 12
    turns = [threading.Event() for _ in range(2 * rounds + 1)]
    turns[0].set()

    def call(thread: int) -> None:
        works: list[tuple[Any, Any]] = []
        for n in range(thread, 2 * rounds, 2):
            assert turns[n].wait(_SECONDS)
            if thread == 0:
                work = comm.all_gather(np.full(1, n + comm.rank), async_op=True)
                works.append((work, [n + m for m in range(comm.size)]))
            else:
                work = comm.all_reduce(np.full(9, n), async_op=True)
                works.append((work, [n * comm.size] * 9))
            turns[n + 1].set()
        for work, expected in works if thread else reversed(works):
            assert list(work.wait(_SECONDS)) == expected

    _in_threads(lambda: call(0), lambda: call(1))
    comm.barrier()


def threads_waiting(comm: Communicator) -> None:
    """Threads wait at the same time, each for its own work, the last one first."""
    works = [comm.all_reduce(np.full(20000, float(n)), async_op=True) for n in range(20)]

    def wait(n: int) -> None:
        assert works[n].wait(_SECONDS)[-1] == n * comm.size

    _in_threads(*(functools.partial(wait, n) for n in reversed(range(len(works)))))
