"""How much memory a logical device has given away, and how much it may."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

from allreduce.errors import OutOfMemoryError

# What held the last user's memory may be garbage that waits for the collector. Three rounds free a
# model: its functions, then the programs that were compiled of them, then their arenas and values.
_COLLECTIONS = 3

# What lies in memory, for errors: the bytes of each part, and what it is.
Contents = Sequence[tuple[int, str]]
_LISTED = 5  # parts in an error

_collecting = threading.Lock()
# As what is collected may wait for a thread that wants to collect, nobody waits for ever.
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
    """List the largest parts of what lies in memory, for the end of a message."""
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
        """Count memory that is about to be made; returns what `give_back` takes.

        Args:
            nbytes: How much.
            contents: What it is for.

        Raises:
            OutOfMemoryError: It would be more than the limit, also without what nobody uses any
                more.
        """
        # Not under the lock: what is collected may wait for threads, and these for the lock.
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
        """List the largest parts of what is in use, and of what was asked for in vain."""
        wanted = [(nbytes, f"{what}, which was asked for") for nbytes, what in asked]
        held = [part for _, contents in list(self._held.values()) for part in contents]
        return largest((*wanted, *held))

    def _fits(self, used: int, nbytes: int) -> bool:
        return self.limit is None or used + nbytes <= self.limit

    def give_back(self, number: int) -> None:
        """Count no longer what a `take` has counted."""
        del self._held[number]

    def until_gone(self, number: int, owner: object) -> None:
        """Give back what was taken when nobody uses `owner` any more."""
        weakref.finalize(owner, self.give_back, number).atexit = False
