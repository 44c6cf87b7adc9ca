"""Which elements of a call go from whom to whom: what kernels/cpu/segments.h says, for plans."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from allreduce.comm.call import Call

Array = NDArray[Any]

_LINE = 64  # bytes: slices are cut at whole cache lines
_WHOLE = ("all_reduce", "reduce", "broadcast")


def share(call: Call, member: int) -> int:
    """Return the elements of a member's share of what is joined or cut."""
    return call.count if call.counts is None else call.counts[member]


def given(call: Call, source: int, to: int) -> int:
    """Return how many elements one member's input has for another (or itself).

    In an all_to_all of unequal shares, only `source` itself knows.
    """
    if call.collective in ("broadcast", "scatter") and source != call.root:
        return 0
    if call.collective in _WHOLE:
        return call.count
    if call.collective == "all_gather":
        return share(call, source)
    if call.collective == "gather":
        return share(call, source) if to == call.root else 0
    return 0 if call.collective == "barrier" else share(call, to)


def taken(call: Call, me: int, source: int) -> int:
    """Return how many elements member `me` gets from another, or itself."""
    if call.collective == "all_to_all":
        return share(call, source) if call.receives is None else call.receives[source]
    return given(call, source, me)


def inputs(call: Call, size: int, member: int) -> int:
    """Return the elements of a member's input, where it has one."""
    if call.collective in ("reduce_scatter", "scatter", "all_to_all"):
        return sum(share(call, to) for to in range(size))
    if call.collective in ("all_gather", "gather"):
        return share(call, member)
    return call.count


def slice_of(count: int, item: int, size: int, member: int) -> int:
    """Return how many of `count` elements a member reduces."""
    low, high = slice_bounds(count, item, size, member)
    return high - low


def slice_bounds(count: int, item: int, size: int, member: int) -> tuple[int, int]:
    """Return the first of `count` elements that a member reduces, and what comes behind the last.

    They are cut at whole cache lines.
    """
    line = _LINE // item

    def cut(number: int) -> int:
        return count if number == size else count * number // size // line * line

    return cut(member), cut(member + 1)


def in_place(call: Call, x: Array | None, out: Array | None, me: int) -> bool:
    """Say whether a member's own part of the output is that of the input, in memory."""
    if x is None or out is None:
        return False
    before = sum(share(call, member) for member in range(me)) * x.itemsize
    start, end = x.ctypes.data, out.ctypes.data
    if call.collective == "scatter" and me == call.root:
        start += before
    elif call.collective in ("all_gather", "gather"):
        end += before
    return bool(start == end)


def pieces(length: int, chunk: int) -> list[tuple[int, int]]:
    """Return how many chunks of each length `length` elements make: (elements, how many)."""
    whole, rest = divmod(length, chunk)
    return [(chunk, whole)] * bool(whole) + [(rest, 1)] * bool(rest)
