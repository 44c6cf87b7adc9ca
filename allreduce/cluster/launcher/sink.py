"""The launcher's own output, written without ever waiting for whoever reads it."""

from __future__ import annotations

import errno
import logging
import os
import select
from collections.abc import Callable

_FULL = 2**20  # bytes; with more to write, the ranks' output is left in their pipes
_NOBODY_READS = (errno.EPIPE, errno.EIO)  # the latter from a terminal that has been closed
_PIECE = select.PIPE_BUF  # as much as a pipe that polls as writable takes without blocking


class Sink:
    """One stream of ours; what its reader does not take yet is kept.

    It is polled, and not made non-blocking: that would hold for every process that has it open.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.broken = False  # nobody will ever read it; what is written is dropped
        self._kept = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def waiting(self) -> bool:
        """Whether there is something that the reader has not taken."""
        return bool(self._kept)

    @property
    def full(self) -> bool:
        """Whether nothing more should be written for now."""
        return len(self._kept) > _FULL

    def write(self, data: bytes) -> None:
        """Take `data`; `flush` writes it."""
        if not self.broken:
            self._kept += data

    def flush(self) -> None:
        """Write what the reader takes now."""
        try:
            while self._kept and self._poll.poll(0):
                del self._kept[: os.write(self.fd, self._kept[:_PIECE])]
        except BlockingIOError:  # another process has made it non-blocking
            return
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            self.broken = True
            self._kept.clear()


class Told(logging.Handler):
    """Hands what is logged in any thread to `tell`."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())
