"""Bounded staleness: no worker is more than so many steps ahead of the slowest one.

Source: Ho et al., More effective distributed ML via a stale synchronous parallel parameter server
(NIPS 2013), section 2.
"""

from __future__ import annotations

import threading


class Clocks:
    """Counts the steps of each worker that is computing; safe to use from several threads."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._changed = threading.Condition()

    def rest(self, worker: str) -> None:
        """Note that a worker waits for rows, or has gone; others do not wait for it."""
        with self._changed:
            if self._steps.pop(worker, None) is not None:
                self._changed.notify_all()

    def tick(self, worker: str) -> None:
        """Count a step of a worker; one that comes, or has rested, is level with the slowest."""
        with self._changed:
            slowest = min(self._steps.values(), default=0)
            self._steps[worker] = self._steps.get(worker, slowest) + 1
            self._changed.notify_all()

    def wait(self, worker: str, most: int, timeout: float) -> bool:
        """Wait while a worker is more than `most` steps ahead of the slowest one.

        Args:
            worker: Its name.
            most: The number of steps.
            timeout: In seconds.

        Returns:
            Whether it may go on.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._ahead(worker) <= most, timeout)

    def _ahead(self, worker: str) -> int:
        return self._steps.get(worker, 0) - min(self._steps.values(), default=0)
