"""Waits for other processes: each has an end, and says before it what it waits for."""

from __future__ import annotations

import time

from allreduce.events import logger

WARN_SECONDS = 10.0  # a wait this long is reported, once
_LONGEST_SECONDS = 0.5  # between two looks: of what is more, the process was stopped


class Awake:
    """Seconds from now on, without those in which this process was stopped.

    A job may be stopped as a whole, and go on: by Ctrl-Z, or by a scheduler that suspends it. Then
    nobody was late. It is to be looked at often.
    """

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def look(self) -> float:
        """Return how many seconds it has been until now."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, _LONGEST_SECONDS)
        self._looked = now
        return self._seconds


class Wait:
    """A wait that begins now.

    Args:
        timeout: Seconds that it may last.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._began = time.monotonic()
        self._reported = timeout <= WARN_SECONDS  # its end will tell

    @property
    def remaining(self) -> float:
        """How many seconds are left; not below 0."""
        return max(0.0, self._began + self.timeout - time.monotonic())

    @property
    def quiet(self) -> float:
        """How many seconds are left until there is something to say: its report, or its end."""
        if self._reported:
            return self.remaining
        return max(0.0, self._began + WARN_SECONDS - time.monotonic())

    def goes_on(self, awaited: str) -> bool:
        """Say whether there is time left; reports the wait when it has become long.

        Args:
            awaited: Who is waited for, and what they have to do.
        """
        if not self._reported and not self.quiet:
            self._reported = True
            report(awaited, self.timeout)
        return self.remaining > 0


def report(awaited: str, timeout: float) -> None:
    """Log that somebody is waited for."""
    logger.warning("waiting for %s (for %g s so far, of %g s)", awaited, WARN_SECONDS, timeout)
