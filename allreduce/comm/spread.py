"""Arrays of any strides, laid end to end: read and written by ranges of their elements."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from allreduce.comm import scaling
from allreduce.comm.array import Array
from allreduce.comm.scaling import Factor


class Spread:
    """Arrays of one dtype as one row of elements, each array's in C order; nothing is copied."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = [array for array in arrays if array.size]
        self._ends = list(accumulate(array.size for array in self._arrays))
        self.size = self._ends[-1] if self._ends else 0

    def views(self, low: int, high: int) -> Iterator[Array]:
        """Yield what makes up the elements from `low` to `high`, in their order."""
        at = bisect_right(self._ends, low)
        while low < high:
            array, end = self._arrays[at], self._ends[at]
            begin = end - array.size
            yield from _within(array, low - begin, min(high, end) - begin)
            low, at = end, at + 1

    def run(self, low: int, high: int) -> Array | None:
        """Return a range flat and in its place, if its elements lie one after the other."""
        parts = list(self.views(low, high))
        lies = len(parts) == 1 and parts[0].flags.c_contiguous
        return parts[0].reshape(-1) if lies else None

    def read(self, low: int, high: int, factor: Factor, into: Array) -> None:
        """Copy a range, multiplied, into flat memory."""
        for view in self.views(low, high):
            _copy(view, factor, into[: view.size].reshape(view.shape))
            into = into[view.size :]

    def write(self, low: int, high: int, factor: Factor, data: Array) -> None:
        """Copy flat memory, multiplied, to where a range belongs."""
        for view in self.views(low, high):
            _copy(data[: view.size].reshape(view.shape), factor, view)
            data = data[view.size :]


def _within(array: Array, low: int, high: int) -> Iterator[Array]:
    """Yield views of an array that make up a range of its elements, which is not empty."""
    if array.ndim < 2 or array.flags.c_contiguous:
        yield array.reshape(-1)[low:high]
        return
    row = array.size // len(array)
    first, skipped = divmod(low, row)
    last, rest = divmod(high, row)
    if first == last:
        yield from _within(array[first], skipped, rest)
        return
    if skipped:
        yield from _within(array[first], skipped, row)
        first += 1
    if first < last:
        yield array[first:last]
    if rest:
        yield from _within(array[last], 0, rest)


def _copy(source: Array, factor: Factor, target: Array) -> None:
    if factor == 1:
        target[...] = source
    else:
        scaling.apply(source, factor, target)
