"""Signals as something to poll for, acted upon in a loop and not in handlers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType


class Signals:
    """Catches signals from now on; a child's end wakes the poll, too.

    Attributes:
        fd: Readable when something came.
    """

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
    FILES = 2  # that it keeps open

        self._caught: list[signal.Signals] = []
        self.fd, writing = os.pipe()
        for end in (self.fd, writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._catch)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def clear(self) -> None:
        """Let `fd` be readable no longer, until the next one comes."""
        os.read(self.fd, 4096)

    def take(self) -> signal.Signals | None:
        """Return what came first of those not yet taken."""
        return self._caught.pop(0) if self._caught else None

    def _catch(self, number: int, _: FrameType | None) -> None:
        self._caught.append(signal.Signals(number))
