"""How a call is described to native code, and where its arrays lie."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from allreduce.comm.calls.call import COLLECTIVES, DTYPES, OPERATORS, Call

Array = NDArray[Any]
NativeCall = tuple[object, ...]  # collective, operator, type, root, count, counts, receives


def native_words(call: Call) -> NativeCall:
    """Return a call as native code takes it where there is no array to read it from."""
    return (
        COLLECTIVES.index(call.collective),
        OPERATORS.index(call.op or "none"),
        0 if call.dtype == "bytes" else DTYPES.index(call.dtype),
        0 if call.root is None else call.root,
        call.count,
        call.counts,
        call.receives,
    )


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
