"""Ranks' output as whole lines with the rank in front."""

from __future__ import annotations

import os

from allreduce.cluster.launcher.sink import Sink

_LONGEST_LINE = 2**20  # bytes; what is longer is broken, lest memory fill up
_TRACEBACK = b"Traceback (most recent call last):"


class Relay:
    """Copies one stream of one rank, line by line.

    Args:
        source: The reading end of a pipe, non-blocking.
        sink: Where the lines go.
        rank: Whose they are.
    """

    def __init__(self, source: int, sink: Sink, rank: int) -> None:
        self._source, self.sink, self._prefix = source, sink, f"[{rank}] ".encode()
        self._partial = b""
        self._held: list[bytes] | None = None
        self.ended = False  # nobody has the pipe's other end any more
        self.interrupted = False  # from then on, tracebacks of KeyboardInterrupt are left out

    def pump(self) -> bool:
        """Copy some of what there is; returns False when there is no more for now."""
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
        """Copy all that there is, and an unfinished line: its rank has ended."""
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
