"""Check which outputs may share memory with inputs, before anything is copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.array_utils import byte_bounds

from allreduce.comm.arguments.checks import JOINS, Context, Options
from allreduce.comm.calls.call import WHOLE, Array
from allreduce.errors import UsageError


def check_overlap(context: Context, x: Array, out: Array, options: Options) -> None:
    """Allow the same memory, or the own rows of the longer array; refuse other overlaps.

    Arrays between each other, such as every other column, count as overlapping.

    Raises:
        UsageError: They overlap, or elements of `out` do among themselves.
    """
    check_own(f"{context.where}: out", out)
    name = context.collective
    if (x is out and name in WHOLE) or not np.may_share_memory(x, out):
        return
    if name in ("reduce_scatter", "all_to_all"):
        raise UsageError(
            f"{context.where}: out overlaps the input, of which others' shares are still read "
            "while it is written; pass another array, or none"
        )
    shorter, longer = (x, out) if name in JOINS else (out, x)
    if name in (*JOINS, "scatter"):
        rows = len(shorter) if shorter.ndim else 1
        counts = options.counts
        first = context.rank * rows if counts is None else sum(counts[: context.rank])
        longer = longer[first : first + rows]
        shorter = shorter.reshape(longer.shape) if shorter.ndim == 0 else shorter
    if not same(shorter, longer):
        raise UsageError(
            f"{context.where}: out overlaps the input without being the same memory; "
            "pass another array, or a copy"
        )


def check_apart(where: str, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Refuse a list's outputs that overlap each other, or inputs without being the same memory.

    An output may be another item's input: a list's are copied before anything is written.
    """
    for i, array in enumerate(outputs):
        check_own(f"{where}: item {i} of out", array)
    spans = [(*byte_bounds(array), i, False) for i, array in enumerate(inputs)]
    spans += [(*byte_bounds(array), i, True) for i, array in enumerate(outputs)]
    spans.sort()
    for at, (_, end, i, is_output) in enumerate(spans):
        for low, _, j, too in spans[at + 1 :]:
            if low >= end:
                break
            if not (is_output or too):
                continue
            first, second = (outputs if is_output else inputs)[i], (outputs if too else inputs)[j]
            if not np.may_share_memory(first, second):  # nothing shares an empty array
                continue
            if is_output and too:
                raise UsageError(
                    f"{where}: items {min(i, j)} and {max(i, j)} of out overlap, so that one result"
                    " would be lost; pass an array for each"
                )
            if not same(first, second):
                raise UsageError(
                    f"{where}: item {i if is_output else j} of out overlaps item "
                    f"{j if is_output else i} of the list without being the same memory; pass "
                    "another array, or a copy"
                )


def check_own(what: str, out: Array) -> None:
    """Refuse an output whose elements overlap, as in a broadcast view."""
    if out.flags.c_contiguous or out.size == 0:
        return
    reach = out.itemsize  # of the axes so far, from the nearest elements to the farthest
    axes = sorted((abs(s), n) for n, s in zip(out.shape, out.strides, strict=True) if n > 1)
    for stride, length in axes:
        if stride < reach:
            raise UsageError(
                f"{what} has elements that overlap each other (shape {out.shape}, strides "
                f"{out.strides}); pass an array with memory for each"
            )
        reach += stride * (length - 1)


def same(a: Array, b: Array) -> bool:
    """Return whether two arrays have the same elements in the same places of memory."""
    if a.shape != b.shape or a.ctypes.data != b.ctypes.data:
        return False
    steps = zip(a.shape, a.strides, b.strides, strict=True)
    return all(first == second for length, first, second in steps if length > 1)
