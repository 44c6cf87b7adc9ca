"""Shared memory for large arrays between two tasks of one host.

The sender computes an array in a segment, a memfd that both ends have mapped, or copies it there,
and names it in the frame; the receiver reads it there. A flag in the segment says when the receiver
has let go of it, so that no message is needed for that, and few segments serve all steps.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from allreduce.comm.transports.shared.memory import allocate

SMALLEST = 1 << 17  # bytes of an array for which a segment is faster than the socket
MOST_SEGMENTS = 8  # of one connection and direction; if all are in use, the socket carries arrays
_DATA = 64  # where arrays begin, behind the flag
_FREE, _IN_USE = 0, 1


@dataclass(slots=True)
class Segment:
    """A mapped memfd: one byte says whether it is in use; arrays begin at `_DATA`.

    Attributes:
        descriptor: At the sending end, the descriptor that the receiver does not have yet.
        reserved: The memory that a value is computed in, as long as something refers to it.
    """

    number: int
    mapping: mmap.mmap
    descriptor: int | None = None
    reserved: Callable[[], np.ndarray | None] = lambda: None

    @property
    def capacity(self) -> int:
        return len(self.mapping) - _DATA

    @property
    def is_free(self) -> bool:
        """Whether neither end uses it."""
        return self.mapping[0] == _FREE and self.reserved() is None

    def memory(self, nbytes: int) -> np.ndarray:
        """Return the first bytes behind the flag."""
        return np.frombuffer(self.mapping, np.uint8, nbytes, _DATA)

    def holds(self, array: np.ndarray) -> bool:
        """Return whether an array was computed in this segment, and has not been sent."""
        reserved = self.reserved()
        if reserved is None or self.mapping[0] != _FREE or array.nbytes != reserved.nbytes:
            return False
        return _address(array) == _address(reserved)


class Sender:
    """The segments of one direction of a connection, at its sending end."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._guard = threading.Lock()
        self._closed = False

    def reserve(self, nbytes: int) -> np.ndarray | None:
        """Return bytes in a free segment; an array in all of them is not copied by `put`.

        The segment is free again if nothing refers to the bytes, or to views of them, any more, and
        the receiver has let go of what was sent. Half of the segments are not reserved.

        Returns:
            The bytes; None if there is no free segment.

        Raises:
            OSError: There is no memory for another segment.
        """
        with self._guard:
            taken = [each for each in self._segments if each.reserved() is not None]
            if self._closed or len(taken) >= MOST_SEGMENTS // 2:
                return None
            segment = self._free(nbytes)
            if segment is None:
                return None
            memory = segment.memory(nbytes)
            segment.reserved = weakref.ref(memory)
            return memory

    def put(self, array: np.ndarray) -> tuple[Segment, int | None] | None:
        """Copy a contiguous array into a free segment, unless it was computed in one.

        Returns:
            The segment, and the descriptor to pass on and close if the receiver does not have it
            yet; None if there is no free segment.

        Raises:
            OSError: There is no memory for another segment.
        """
        with self._guard:
            found = next((each for each in self._segments if each.holds(array)), None)
            segment = found or self._free(array.nbytes)
            if segment is None:
                return None
            if found is None:
                segment.memory(array.nbytes)[:] = array.reshape(-1).view(np.uint8)
            segment.mapping[0] = _IN_USE
            descriptor, segment.descriptor = segment.descriptor, None
            return segment, descriptor

    def close(self) -> None:
        """Close the descriptors that the receiver has not got."""
        with self._guard:
            self._closed = True
            for each in self._segments:
                if each.descriptor is not None:
                    os.close(each.descriptor)
                    each.descriptor = None

    def _free(self, nbytes: int) -> Segment | None:
        """Return a free segment of so many bytes; None if there is none and may be no more."""
        for each in self._segments:
            if each.capacity >= nbytes and each.is_free:
                return each
        number = self._number()
        if number is None:
            return None
        descriptor = allocate(_DATA + _rounded(nbytes))
        made = Segment(number, _map(descriptor), descriptor)
        for each in self._segments:
            if each.number == number and each.descriptor is not None:
                os.close(each.descriptor)
        self._segments = [each for each in self._segments if each.number != number] + [made]
        return made

    def _number(self) -> int | None:
        """Return the number of a new segment, or of the smallest free one, which it replaces."""
        if len(self._segments) < MOST_SEGMENTS:
            return len(self._segments) + 1
        free = [each for each in self._segments if each.is_free]
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


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _rounded(nbytes: int) -> int:
    """Round up, so that arrays of similar sizes share segments."""
    step = max(mmap.PAGESIZE, 1 << (nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
