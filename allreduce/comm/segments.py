"""Which elements of a call go from whom to whom, as the native code divides them."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm.call import COLLECTIVES, Call

Array = NDArray[Any]


def segments(call: Call, size: int) -> _native.Segments:
    """Return who gives how many elements to whom; pure, and without a communicator.

    In an all_to_all of unequal shares, only the giver itself knows.

    Args:
        call: The call, as one of its members makes it.
        size: How many members there are.
    """
    root = -1 if call.root is None else call.root
    number = COLLECTIVES.index(call.collective)
    return _native.Segments(number, call.count, root, call.counts, call.receives, size)


def slice_of(count: int, item: int, size: int, member: int) -> int:
    """Return how many of `count` elements, of `item` bytes each, a member reduces."""
    low, high = _native.slice_bounds(count, item, size, member)
    return high - low


def in_place(call: Call, x: Array | None, out: Array | None, me: int) -> bool:
    """Say whether a member's own part of the output is that of the input, in memory."""
    if x is None or out is None:
        return False
    shares = [call.count] * me if call.counts is None else call.counts[:me]
    before = sum(shares) * x.itemsize
    start, end = x.ctypes.data, out.ctypes.data
    if call.collective == "scatter" and me == call.root:
        start += before
    elif call.collective in ("all_gather", "gather"):
        end += before
    return bool(start == end)
