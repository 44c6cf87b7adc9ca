"""Calls of arrays that 32 bits cannot count, filled and checked block by block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from allreduce.comm import Communicator
from tests.comm.cases import Array

SHARE = (1 << 31) + 4  # bytes of one of two members; both together pass 4 GiB
TOTAL = 2 * SHARE
_BLOCK = 1 << 26
_PERIOD = 251  # divides no power of two: what is wrapped around is found out
_NUMBERS = np.tile(np.arange(_PERIOD, dtype=np.uint8), _BLOCK // _PERIOD + 2)


def numbers(low: int, count: int, member: int) -> Array:
    """Return what a member has from element `low` on."""
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
    """Make one call of two members in place, or a message from one to the other."""
    x = comm.empty(TOTAL, "uint8") if where == "symmetric" else np.empty(TOTAL, np.uint8)
    if collective == "all_reduce":
        fill(x, comm.rank)
        comm.all_reduce(x, op="max", out=x)
        check(x, lambda low, n: np.maximum(numbers(low, n, 0), numbers(low, n, 1)))
        return
    if collective == "all_gather":
        own = x[comm.rank * SHARE :][:SHARE]
        fill(own, 0, comm.rank * SHARE)
        comm.all_gather(own, out=x)
    else:
        fill(x, comm.rank)
        if collective == "broadcast":
            comm.broadcast(x, root=0, out=x)
        elif comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)
    check(x, lambda low, n: numbers(low, n, 0))
