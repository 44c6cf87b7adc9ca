"""Signals as something to poll for, acted upon in a loop and not in handlers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from types import FrameType


class Signals:
    """Catches signals from now on; a child's end wakes the poll, too.

    Attributes:
        fd: Readable when something came.
    """

    FILES = 2  # that it keeps open

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._caught: list[signal.Signals] = []
        self.fd, self._writing = os.pipe()
        for end in (self.fd, self._writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._catch)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def wake(self) -> None:
        """Make `fd` readable, from any thread."""
        with contextlib.suppress(BlockingIOError):  # it is full, and so readable
            os.write(self._writing, b"\0")

    def clear(self) -> None:
        """Let `fd` be readable no longer, until the next one comes."""
        os.read(self.fd, 4096)

    def take(self) -> signal.Signals | None:
        """Return what came first of those not yet taken."""
        return self._caught.pop(0) if self._caught else None

    def _catch(self, number: int, _: FrameType | None) -> None:
        self._caught.append(signal.Signals(number))
