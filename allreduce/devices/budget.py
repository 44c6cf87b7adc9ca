"""How much memory a logical device has given away, and how much it may."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

from allreduce.errors import OutOfMemoryError

# Unused memory may be garbage that the collector has not freed yet. Three rounds free a model: its
# functions, then the compiled programs, then their arenas and values.
_COLLECTIONS = 3

# The contents of memory, for errors: the bytes and purpose of each part.
Contents = Sequence[tuple[int, str]]
_LISTED = 5  # parts in an error

_collecting = threading.Lock()
# Bounded, because a finalizer may wait for a thread that wants to collect.
_COLLECTING_SECONDS = 2.0


def _collect() -> None:
    """Collect garbage; in the middle of another thread's collection `gc` would do nothing."""
    alone = _collecting.acquire(timeout=_COLLECTING_SECONDS)
    try:
        gc.collect()
    finally:
        if alone:
            _collecting.release()


def largest(contents: Iterable[tuple[int, str]]) -> str:
    """List the largest parts in memory, for the end of a message."""
    parts = sorted(Counter(contents).items(), key=lambda part: -part[0][0])
    lines = [
        f"\n  {f'{times} × ' if times > 1 else ''}{nbytes} bytes: {what}"
        for (nbytes, what), times in parts[:_LISTED]
    ]
    return f"; the largest are{''.join(lines)}" if lines else ""


class Budget:
    """Counts a device's memory while it is in use.

    Attributes:
        limit: In bytes; None where only the machine's memory is one.
        peak: The most bytes that were in use at one time.
    """

    def __init__(self, device: str) -> None:
        self.limit: int | None = None
        self.peak = 0
        self._device = device
        self._adding = threading.RLock()
        # An entry of a dict goes in one step, so that the collector may take one out at any time.
        self._held: dict[int, tuple[int, Contents]] = {}
        self._numbers = itertools.count()

    @property
    def used(self) -> int:
        """The bytes in use now."""
        return sum(nbytes for nbytes, _ in list(self._held.values()))

    def take(self, nbytes: int, contents: Contents = ()) -> int:
        """Count memory before it is allocated; return the token for `give_back`.

        Raises:
            OutOfMemoryError: It would exceed the limit, even after garbage collection.
        """
        # Not under the lock: finalizers may wait for threads, and these for the lock.
        for _ in range(_COLLECTIONS):
            if self._fits(self.used, nbytes):
                break
            _collect()
        with self._adding:
            used = self.used
            if not self._fits(used, nbytes):
                raise OutOfMemoryError(
                    f"{nbytes} bytes do not fit on {self._device}: {used} of its limit of "
                    f"{self.limit} bytes are in use; use a smaller model or batch, other devices, "
                    "or another memory_limit in ar.config.set_logical_devices"
                    f"{self.largest(contents)}"
                )
            number = next(self._numbers)
            self._held[number] = nbytes, contents
            self.peak = max(self.peak, used + nbytes)
            return number

    def largest(self, asked: Contents = ()) -> str:
        """List the largest parts in use, and the request that failed."""
        wanted = [(nbytes, f"{what}, which was asked for") for nbytes, what in asked]
        held = [part for _, contents in list(self._held.values()) for part in contents]
        return largest((*wanted, *held))

    def _fits(self, used: int, nbytes: int) -> bool:
        return self.limit is None or used + nbytes <= self.limit

    def give_back(self, number: int) -> None:
        """Undo the count of a `take`."""
        del self._held[number]

    def until_gone(self, number: int, owner: object) -> None:
        """Give it back when `owner` is freed."""
        weakref.finalize(owner, self.give_back, number).atexit = False
