"""Calls of arrays that 32 bits cannot count, filled and checked block by block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from allreduce.comm import Communicator
from tests.comm.cases.collective_cases import Array

SHARE = (1 << 31) + 4  # bytes of one of two members; both together pass 4 GiB
TOTAL = 2 * SHARE
_BLOCK = 1 << 26
_PERIOD = 251  # divides no power of two: a wrapped count is detected
_NUMBERS = np.tile(np.arange(_PERIOD, dtype=np.uint8), _BLOCK // _PERIOD + 2)


def numbers(low: int, count: int, member: int) -> Array:
    """Return a member's values from element `low` on."""
    return _NUMBERS[(low + member * 100) % _PERIOD :][:count]


def fill(array: Array, member: int, first: int = 0) -> None:
    for low in range(0, array.size, _BLOCK):
        block = array[low : low + _BLOCK]
        block[...] = numbers(first + low, block.size, member)


def check(array: Array, wanted: Callable[[int, int], Array]) -> None:
    for low in range(0, array.size, _BLOCK):
        block = array[low : low + _BLOCK]
        assert np.array_equal(block, wanted(low, block.size)), f"from {low} of {array.size} on"


def huge(comm: Communicator, collective: str, where: str) -> None:
    """Make one call of two members, in place where that is possible."""
    total = comm.empty(TOTAL, "uint8") if where == "symmetric" else np.empty(TOTAL, np.uint8)
    _CALLS[collective](comm, total)


def _all_reduce(comm: Communicator, x: Array) -> None:
    fill(x, comm.rank)
    comm.all_reduce(x, op="max", out=x)
    check(x, _largest)


def _reduce(comm: Communicator, x: Array) -> None:
    fill(x, comm.rank)
    comm.reduce(x, op="max", root=1, out=x if comm.rank == 1 else None)
    check(x, _largest if comm.rank == 1 else lambda low, n: numbers(low, n, 0))


def _reduce_scatter(comm: Communicator, x: Array) -> None:
    fill(x, comm.rank)
    own = comm.reduce_scatter(x, op="max")
    check(own, lambda low, n: _largest(comm.rank * SHARE + low, n))


def _all_gather(comm: Communicator, x: Array) -> None:
    own = x[comm.rank * SHARE :][:SHARE]
    fill(own, 0, comm.rank * SHARE)
    comm.all_gather(own, out=x)
    check(x, lambda low, n: numbers(low, n, 0))


def _gather(comm: Communicator, x: Array) -> None:
    own = x[comm.rank * SHARE :][:SHARE]
    fill(own, 0, comm.rank * SHARE)
    comm.gather(own, root=1, out=x if comm.rank == 1 else None)
    if comm.rank == 1:
        check(x, lambda low, n: numbers(low, n, 0))


def _scatter(comm: Communicator, x: Array) -> None:
    own = x[:SHARE] if comm.rank == 0 else np.empty(SHARE, np.uint8)
    if comm.rank == 1:
        fill(x, 1)
    comm.scatter(x if comm.rank == 1 else None, root=1, out=own)
    check(own, lambda low, n: numbers(comm.rank * SHARE + low, n, 1))


def _all_to_all(comm: Communicator, x: Array) -> None:
    fill(x, comm.rank)
    result = comm.all_to_all(x)
    check(result[:SHARE], lambda low, n: numbers(comm.rank * SHARE + low, n, 0))
    check(result[SHARE:], lambda low, n: numbers(comm.rank * SHARE + low, n, 1))


def _broadcast(comm: Communicator, x: Array) -> None:
    fill(x, comm.rank)
    comm.broadcast(x, root=0, out=x)
    check(x, lambda low, n: numbers(low, n, 0))


def _message(comm: Communicator, x: Array) -> None:
    fill(x, comm.rank)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.recv(x, 0)
    check(x, lambda low, n: numbers(low, n, 0))


def _largest(low: int, count: int) -> Array:
    return np.maximum(numbers(low, count, 0), numbers(low, count, 1))


_CALLS: dict[str, Callable[[Communicator, Array], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "message": _message,
}
COLLECTIVES = tuple(_CALLS)
