"""Find the user's line for messages."""

from __future__ import annotations

import sys
import threading
from types import FrameType

# By their modules' names: an editable install has `allreduce.strategies` in another folder. NumPy
# calls functions that were passed to it.
_LIBRARIES = frozenset((__name__.partition(".")[0], "numpy"))


class _Started(threading.local):
    line: str | None = None  # of the user's where this thread was started, if one of ours


_here = _Started()


def started_at(line: str) -> None:
    """Set the user's line that started this thread."""
    _here.line = line


def users_line() -> str:
    """Return the innermost caller outside of this package and NumPy, as "file:line"."""
    frame = sys._getframe(1)
    while frame.f_back and _package(frame) in _LIBRARIES:
        frame = frame.f_back
    if _here.line is not None and _package(frame) in (*_LIBRARIES, threading.__name__):
        return _here.line
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
