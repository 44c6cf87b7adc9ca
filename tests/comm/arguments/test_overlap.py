"""Outputs that share memory: accepted ones, and the errors of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from allreduce import errors
from allreduce.comm import Communicator, replica_communicators
from tests.harness import run_threads, world_of_one

ELSEWHERE = "out overlaps the input without being the same memory"
READ = "out overlaps the input, of which others' shares are still read"
ITSELF = "has elements that overlap each other"


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """One of two members: a call that gets past its checks would wait for the other."""
    members = replica_communicators(world_of_one(), 2, name="overlap", timeout=20)
    yield members[1]
    for member in members:
        member.close()


ROW, SQUARE = np.ones(20), np.ones((4, 4))
A, B, C = np.ones(4), np.ones(4), np.ones(4)
REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "between": (ELSEWHERE, lambda c: c.all_reduce(ROW[::2], out=ROW[1::2])),
    "later": (ELSEWHERE, lambda c: c.all_reduce(ROW[:10], out=ROW[5:15])),
    "scaled": (ELSEWHERE, lambda c: c.all_reduce(ROW[:10], out=ROW[5:15], prescale=2)),
    "strided input": (ELSEWHERE, lambda c: c.all_reduce(ROW[:10:2], out=ROW[:5])),
    "strided output": (ELSEWHERE, lambda c: c.broadcast(ROW[:5], out=ROW[:10:2])),
    "transposed": (ELSEWHERE, lambda c: c.all_reduce(SQUARE, out=SQUARE.T)),
    "reversed": (ELSEWHERE, lambda c: c.reduce(ROW, root=1, out=ROW[::-1])),
    "another's rows": (ELSEWHERE, lambda c: c.all_gather(ROW[:10], out=ROW)),
    "rows in part": (ELSEWHERE, lambda c: c.gather(ROW[5:15], root=1, out=ROW)),
    "halves": (READ, lambda c: c.reduce_scatter(ROW, out=ROW[10:])),
    "exchange": (READ, lambda c: c.all_to_all(ROW, out=ROW)),
    "unequal": (READ, lambda c: c.reduce_scatter(ROW, counts=[3, 17], out=ROW[3:])),
    "one place": (ITSELF, lambda c: c.all_reduce(ROW[:5], out=as_strided(ROW[5:], (5,), (0,)))),
    "windows": (ITSELF, lambda c: c.broadcast(SQUARE, out=as_strided(ROW, (4, 4), (16, 8)))),
    "a message": (ITSELF, lambda c: c.recv(as_strided(ROW, (4,), (0,)), source=0)),
    "a list's": (r"items 0 and 1 of out overlap", lambda c: c.all_reduce([A, B], out=[C, C])),
    "a list's parts": (
        "items 0 and 2 of out overlap",
        lambda c: c.all_reduce([A, B, A], out=[ROW[:4], C, ROW[3:7]]),
    ),
    "a list's input": (
        "item 1 of out overlaps item 0 of the list without being the same memory",
        lambda c: c.broadcast([ROW[:4], B], out=[C, ROW[2:6]]),
    ),
    "a list's own": (
        f"item 0 of out {ITSELF}",
        lambda c: c.all_reduce([A, B], out=[as_strided(ROW, (4,), (0,)), C]),
    ),
}


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_overlaps_are_refused(comm: Communicator, case: str, async_op: bool) -> None:
    says, call = REFUSED[case]

    class Started:
        def __getattr__(self, name: str) -> Any:
            return lambda x, **rest: getattr(comm, name)(x, async_op=async_op, **rest)

    with pytest.raises(errors.UsageError, match=says) as caught:
        call(Started())
    assert str(caught.value).startswith("[shared] replica 1 (rank 0): ")
    assert (ROW == 1).all()


def test_one_member_alone_is_refused_as_many_are() -> None:
    def member(comm: Communicator) -> None:
        x = np.ones(4)
        for call in (comm.reduce_scatter, comm.all_to_all):
            with pytest.raises(errors.UsageError, match=READ):
                call(x, out=x)

    run_threads(member, 1)


def test_what_is_the_same_memory_is_taken() -> None:
    def member(comm: Communicator) -> None:
        row, square = np.arange(20.0), np.arange(16.0).reshape(4, 4)
        comm.all_reduce(row[::2], out=row[::2])  # in place, with gaps
        np.testing.assert_array_equal(row, np.arange(20.0) * np.tile([2, 1], 10))
        comm.all_reduce(square.T, out=square.T, prescale=0.5)
        np.testing.assert_array_equal(square, np.arange(16.0).reshape(4, 4))
        joined = np.zeros((4, 3))
        own = joined[2 * comm.rank :][:2, ::2]  # of every other column
        own[:] = comm.rank + 1
        comm.all_gather(own, out=joined[:, ::2])
        np.testing.assert_array_equal(joined[:, 0], [1, 1, 2, 2])
        numbers = np.zeros(2)
        one = numbers[comm.rank : comm.rank + 1].reshape(())
        one[...] = comm.rank + 1
        comm.all_gather(one, out=numbers)
        np.testing.assert_array_equal(numbers, [1, 2])

    run_threads(member, 2)
