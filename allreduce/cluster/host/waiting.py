"""Wait for other processes, with a timeout, and an earlier report that names them."""

from __future__ import annotations

import time

from allreduce.events import logger

WARN_SECONDS = 10.0  # after which a wait is reported, once
_LONGEST_SECONDS = 0.5  # between two calls of look(); beyond that, the process was stopped


class AwakeClock:
    """A clock that does not count while this process is stopped.

    Ctrl-Z or a scheduler may suspend a whole job, and no rank is late then. Call `look` often.
    """

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def look(self) -> float:
        """Return the seconds counted so far."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, _LONGEST_SECONDS)
        self._looked = now
        return self._seconds


class Wait:
    """A wait that begins now."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._began = time.monotonic()
        self._reported = timeout <= WARN_SECONDS  # the timeout's error is enough

    @property
    def remaining(self) -> float:
        """The seconds that are left, at least 0."""
        return max(0.0, self._began + self.timeout - time.monotonic())

    @property
    def quiet(self) -> float:
        """The seconds until the next message: the report, or the timeout."""
        if self._reported:
            return self.remaining
        return max(0.0, self._began + WARN_SECONDS - time.monotonic())

    def has_time_left(self, awaited: str) -> bool:
        """Return whether time is left; report a long wait once.

        Args:
            awaited: Names the awaited processes and the call that they must make.
        """
        if not self._reported and not self.quiet:
            self._reported = True
            report(awaited, self.timeout)
        return self.remaining > 0


def report(awaited: str, timeout: float) -> None:
    """Log a long wait."""
    logger.warning("waiting for %s (for %g s so far, of %g s)", awaited, WARN_SECONDS, timeout)
