"""Which gradients a synchronous update takes.

Source: Chen et al., Revisiting distributed synchronous SGD (2016), section 3: with backup workers,
an update takes the first gradients that come, and drops the others.
"""

from __future__ import annotations

import threading


class Aggregation:
    """Counts the shares of synchronous updates, one after the other; safe from several threads.

    Args:
        size: The number of gradients in an update (`replicas_to_aggregate`).
        total: The number of workers that compute at a time (`total_replicas`); those above `size`
            are backups.
        first: The number of the first update.

    Attributes:
        update: The number of the update under way, which is also the version of the parameters.
        needed: How many gradients it takes; 0 before `begin`.
        dropped: How many gradients came too late.
    """

    def __init__(self, size: int, total: int, first: int = 0) -> None:
        self.size, self.total = size, total
        self.update = first
        self.needed = 0
        self.dropped = 0
        self._accepted: dict[int, str] = {}  # the worker of each share; "" if it has died
        self._done: set[int] = set()  # those of them that all servers have
        self._lock = threading.Lock()

    @property
    def has_backups(self) -> bool:
        return self.total > self.size

    @property
    def accepted(self) -> int:
        """The number of gradients that the update has taken."""
        return len(self._accepted)

    def begin(self, left: int) -> None:
        """Begin an update, if none is under way.

        Args:
            left: How many shares there are at most.
        """
        with self._lock:
            self.needed = self.needed or min(self.size, left)

    def is_accepted(self, share: int) -> bool:
        """Return whether a share is in the update, maybe by a worker that has died."""
        return share in self._accepted

    def is_promised(self, share: int) -> bool:
        """Return whether a worker that lives gives the gradient of a share."""
        return bool(self._accepted.get(share))

    def claim(self, worker: str, share: int, update: int) -> bool:
        """Take a gradient into the update, or drop it.

        Args:
            worker: Who has computed it.
            share: Its number, unique in the update; below 0 in loops of the program's own. A share
                of which another worker gives the gradient is dropped.
            update: The update whose parameters it was computed with.
        """
        with self._lock:
            given = self._accepted.get(share)
            fits = len(self._accepted) < self.needed if given is None else given in ("", worker)
            if fits and update == self.update:
                self._accepted[share] = worker
                return True
            self.dropped += 1
            return False

    def drop(self) -> None:
        """Count a gradient of a share that is done."""
        with self._lock:
            self.dropped += 1

    def finish(self, share: int) -> bool:
        """Note that all servers have a share's gradient; returns whether the update is over."""
        with self._lock:
            if share in self._accepted:
                self._done.add(share)
            if not self.needed or len(self._done) < self.needed:
                return False
            self._go_on()
            return True

    def cancel(self) -> None:
        """Go on to another update; servers drop the shares that they have of the one under way."""
        with self._lock:
            self._go_on()

    def _go_on(self) -> None:
        self.update += 1
        self.needed = 0
        self._accepted.clear()
        self._done.clear()

    def lose(self, worker: str) -> None:
        """Note that a worker has died.

        The shares of `fit` that it was to give stay in the update, as some servers may have their
        gradients; another worker computes them again. Any other gradient can take the place of one
        of a loop of the program's own.
        """
        with self._lock:
            left = [s for s, w in self._accepted.items() if w == worker and s not in self._done]
            for share in left:
                if share < 0:
                    del self._accepted[share]
                else:
                    self._accepted[share] = ""
