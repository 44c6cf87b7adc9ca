"""The line of the user's that runs, for messages."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

# Of this package and of NumPy, which calls back what was passed to it.
_NOT_THE_USERS = tuple(
    f"{Path(file).resolve()}/" for file in (Path(__file__).parents[1], Path(np.__file__).parent)
)


class _Started(threading.local):
    line: str | None = None  # of the user's where this thread was started, if one of ours


_here = _Started()


def started_at(line: str) -> None:
    """Say where the user's code is that this thread of ours works for."""
    _here.line = line


def users_line() -> str:
    """Find the innermost caller outside of this package and NumPy, as "file:line"."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if _here.line is not None and file.startswith((threading.__file__, *_NOT_THE_USERS)):
        return _here.line
    return f"{file}:{frame.f_lineno}"
