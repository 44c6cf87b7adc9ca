"""Ranks' output as whole lines with the rank in front."""

from __future__ import annotations

import os
from typing import BinaryIO

_LONGEST_LINE = 2**20  # bytes; what is longer is broken, lest memory fill up
_TRACEBACK = b"Traceback (most recent call last):"


class Relay:
    """Copies one stream of one rank, line by line.

    Args:
        source: The reading end of a pipe, non-blocking.
        sink: Where the lines go.
        rank: Whose they are.
    """

    def __init__(self, source: int, sink: BinaryIO, rank: int) -> None:
        self._source, self._sink, self._prefix = source, sink, f"[{rank}] ".encode()
        self._partial = b""
        self._held: list[bytes] | None = None
        self.interrupted = False  # from then on, tracebacks of KeyboardInterrupt are left out

    def pump(self) -> bool:
        """Copy what there is; returns False at the stream's end.

        Raises:
            BrokenPipeError: Nobody reads our output any more.
        """
        while True:
            try:
                data = os.read(self._source, 2**16)
            except BlockingIOError:
                self._sink.flush()
                return True
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._line(line)
            if len(self._partial) > _LONGEST_LINE or not data:
                self.finish()
            if not data:
                return False

    def finish(self) -> None:
        """Write an unfinished line."""
        if self._partial:
            self._line(self._partial)
            self._partial = b""
        self._release()
        self._sink.flush()

    def _line(self, line: bytes) -> None:
        if self.interrupted and line == _TRACEBACK:
            self._release()
            self._held = [line]
        elif self._held is not None and line.startswith(b"KeyboardInterrupt"):
            self._held = None
        elif self._held is not None and line.startswith(b" "):
            self._held.append(line)
        else:
            self._release()
            self._write(line)

    def _release(self) -> None:
        held, self._held = self._held or [], None
        for line in held:
            self._write(line)

    def _write(self, line: bytes) -> None:
        self._sink.write(self._prefix + line + b"\n")
