"""Shared memory for large arrays between two tasks of one host.

The sender copies an array into a segment, a memfd that both ends have mapped, and names it in the
frame; the receiver reads it there. A flag in the segment says when the receiver has let go of it,
so that no message is needed for that, and few segments serve all steps.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np

from allreduce.comm.transports.shared.memory import allocate

SMALLEST = 1 << 17  # bytes of an array for which a segment is faster than the socket
MOST_SEGMENTS = 8  # of one connection and direction; if all are in use, the socket carries arrays
_DATA = 64  # where arrays begin, behind the flag
_FREE, _IN_USE = 0, 1


@dataclass(slots=True)
class Segment:
    """A mapped memfd: one byte says whether it is in use; arrays begin at `_DATA`."""

    number: int
    mapping: mmap.mmap

    @property
    def memory(self) -> np.ndarray:
        return np.frombuffer(self.mapping, np.uint8)

    @property
    def capacity(self) -> int:
        return len(self.mapping) - _DATA


class Sender:
    """The segments of one direction of a connection, at its sending end."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def put(self, array: np.ndarray) -> tuple[Segment, int | None] | None:
        """Copy a contiguous array into a free segment.

        Returns:
            The segment, and the descriptor to pass on and close if the receiver does not have it
            yet; None if there is no free segment.

        Raises:
            OSError: There is no memory for another segment.
        """
        fitting = [each for each in self._segments if each.capacity >= array.nbytes]
        free = next((each for each in fitting if each.mapping[0] == _FREE), None)
        descriptor = None
        if free is None:
            if (number := self._number()) is None:
                return None
            descriptor = allocate(_DATA + _rounded(array.nbytes))
            free = Segment(number, _map(descriptor))
            self._segments = [each for each in self._segments if each.number != number] + [free]
        free.mapping[0] = _IN_USE
        free.memory[_DATA : _DATA + array.nbytes] = array.reshape(-1).view(np.uint8)
        return free, descriptor

    def _number(self) -> int | None:
        """Return the number of a new segment, or of the smallest free one, which it replaces."""
        if len(self._segments) < MOST_SEGMENTS:
            return len(self._segments) + 1
        free = [each for each in self._segments if each.mapping[0] == _FREE]
        return min(free, key=lambda each: each.capacity).number if free else None


class Receiver:
    """The segments of one direction of a connection, at its receiving end."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def add(self, number: int, descriptor: int) -> None:
        """Map a segment; closes the descriptor.

        Raises:
            OSError: It cannot be mapped.
        """
        try:
            self._segments[number] = Segment(number, _map(descriptor))
        finally:
            os.close(descriptor)

    def view(self, number: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array in a segment, which is free again when nobody holds the array.

        Raises:
            ValueError: There is no such segment, or it is smaller.
        """
        segment = self._segments.get(number)
        count = int(np.prod(shape, dtype=np.int64))
        if segment is None or count * dtype.itemsize > segment.capacity:
            raise ValueError(f"it sent {count} elements in segment {number}, which is not there")
        array = np.frombuffer(segment.mapping, dtype, count, _DATA)
        weakref.finalize(array, _let_go, segment.mapping, os.getpid()).atexit = False
        return array.reshape(shape)


def _let_go(mapping: mmap.mmap, owner: int) -> None:
    if os.getpid() == owner:  # a child made by fork has its own copy of the array object only
        mapping[0] = _FREE


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)


def _rounded(nbytes: int) -> int:
    """Round up, so that arrays of similar sizes share segments."""
    step = max(mmap.PAGESIZE, 1 << (nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
