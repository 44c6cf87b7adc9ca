"""Wait for other processes, with a timeout, and an earlier report that names them."""

from __future__ import annotations

import math
import time

from allreduce.events import logger

WARN_SECONDS = 10.0  # after which a wait is reported
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
    """A wait that begins now.

    Args:
        timeout: In seconds.
        repeats: Whether to report it again and again, instead of once.
    """

    def __init__(self, timeout: float, *, repeats: bool = False) -> None:
        self.timeout, self._repeats = timeout, repeats
        self._began = time.monotonic()
        # For a short one, the timeout's error is enough.
        self._reports_after = WARN_SECONDS if timeout > WARN_SECONDS else math.inf

    @property
    def remaining(self) -> float:
        """The seconds that are left, at least 0."""
        return max(0.0, self._began + self.timeout - time.monotonic())

    @property
    def quiet(self) -> float:
        """The seconds until the next message: the report, or the timeout."""
        until_report = max(0.0, self._began + self._reports_after - time.monotonic())
        return min(until_report, self.remaining)

    def has_time_left(self, awaited: str) -> bool:
        """Return whether time is left; report a long wait.

        Args:
            awaited: Names the awaited processes and the call that they must make.
        """
        if time.monotonic() >= self._began + self._reports_after:
            report(awaited, self.timeout, self._reports_after)
            self._reports_after += WARN_SECONDS if self._repeats else math.inf
        return self.remaining > 0


def report(awaited: str, timeout: float, seconds: float | None = None) -> None:
    """Log a long wait; it has lasted `WARN_SECONDS` if it is not said how many."""
    so_far = WARN_SECONDS if seconds is None else seconds
    logger.warning("waiting for %s (for %g s so far, of %g s)", awaited, so_far, timeout)
