"""The launcher's output: the ranks' lines with the rank in front, written without blocking."""

from __future__ import annotations

import errno
import logging
import os
import select
from collections.abc import Callable

from allreduce.cluster.launcher.children import Child

_FULL = 2**20  # bytes; above this the ranks' output stays in their pipes
_NOBODY_READS = (errno.EPIPE, errno.EIO)  # EIO: the terminal was closed
_PIECE = select.PIPE_BUF  # a pipe that polls as writable takes this much without blocking
_LONGEST_LINE = 2**20  # bytes; longer lines are split, to bound memory
_TRACEBACK = b"Traceback (most recent call last):"


class Sink:
    """One output stream; buffers data that its reader does not take yet.

    The descriptor is polled rather than made non-blocking: that flag would apply to every process
    that has it open.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.broken = False  # the reader is gone; further output is dropped
        self._kept = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def waiting(self) -> bool:
        """Whether the buffer holds unwritten bytes."""
        return bool(self._kept)

    @property
    def full(self) -> bool:
        """Whether writers should pause."""
        return len(self._kept) > _FULL

    def write(self, data: bytes) -> None:
        """Buffer `data`; `flush` writes it."""
        if not self.broken:
            self._kept += data

    def flush(self) -> None:
        """Write as much as the reader takes now."""
        try:
            while self._kept and self._poll.poll(0):
                del self._kept[: os.write(self.fd, self._kept[:_PIECE])]
        except BlockingIOError:  # another process made it non-blocking
            return
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            self.broken = True
            self._kept.clear()


class LogForwarder(logging.Handler):
    """Passes log messages of any thread to `tell`."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


class Relay:
    """Copies one stream of one rank, line by line, and notes the error of its last traceback."""

    def __init__(self, source: int, sink: Sink, child: Child) -> None:
        self._source, self.sink, self._child = source, sink, child
        self._prefix = f"[{child.label}] ".encode()
        self._in_traceback = False
        self._partial = b""
        self._held: list[bytes] | None = None
        self.ended = False  # no process holds the writing end
        self.interrupted = False  # if set, tracebacks of KeyboardInterrupt are dropped

    def pump(self) -> bool:
        """Copy some of the available output; returns False when none is left for now."""
        try:
            data = os.read(self._source, 2**16)
        except BlockingIOError:
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._partial) > _LONGEST_LINE or not data:
            self.finish()
        self.ended = not data
        self.sink.flush()
        return not self.ended

    def drain(self) -> None:
        """Copy all output of a rank that has ended, including an unfinished line."""
        while self.pump():
            pass
        self.finish()

    def finish(self) -> None:
        """Write an unfinished line."""
        if self._partial:
            self._line(self._partial)
            self._partial = b""
        self._release()
        self.sink.flush()

    def _line(self, line: bytes) -> None:
        if self.interrupted and line == _TRACEBACK:
            self._release()
            self._held = [line]
        elif self._held is not None and line.startswith(b"KeyboardInterrupt"):
            self._held = None
        elif self._held is not None and (not line or line.startswith(b" ")):
            self._held.append(line)
        else:
            self._release()
            self._write(line)

    def _release(self) -> None:
        held, self._held = self._held or [], None
        for line in held:
            self._write(line)

    def _write(self, line: bytes) -> None:
        self.sink.write(self._prefix + line + b"\n")
        if line == _TRACEBACK:
            self._in_traceback = True
        elif self._in_traceback and not line.startswith(b" "):
            self._in_traceback, self._child.error = False, line.decode(errors="replace")
