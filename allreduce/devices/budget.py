"""How much memory a logical device has given away, and how much it may."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

from allreduce.errors import OutOfMemoryError

# What held the last user's memory may be garbage that waits for the collector. Three rounds free a
# model: its functions, then the programs that were compiled of them, then their arenas and values.
_COLLECTIONS = 3

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
        self._held: dict[int, int] = {}
        self._numbers = itertools.count()

    @property
    def used(self) -> int:
        """The bytes in use now."""
        return sum(list(self._held.values()))

    def take(self, nbytes: int) -> int:
        """Count memory that is about to be made; returns what `give_back` takes.

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
                )
            number = next(self._numbers)
            self._held[number] = nbytes
            self.peak = max(self.peak, used + nbytes)
            return number

    def _fits(self, used: int, nbytes: int) -> bool:
        return self.limit is None or used + nbytes <= self.limit

    def give_back(self, number: int) -> None:
        """Count no longer what a `take` has counted."""
        del self._held[number]

    def until_gone(self, number: int, owner: object) -> None:
        """Give back what was taken when nobody uses `owner` any more."""
        weakref.finalize(owner, self.give_back, number).atexit = False
