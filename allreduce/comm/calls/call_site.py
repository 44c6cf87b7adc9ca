"""Call sites and shapes that members exchange for error messages.

Finding a call site takes a few hundred nanoseconds, as it walks the frames up to the caller. Its
text is formatted once per site.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from typing import NamedTuple

from allreduce.comm.calls.call import TEXT_BYTES, Array

NOTE_BYTES = 180  # native kNoteText
_SHAPE_BYTES = 60
_PACKAGE = __name__.partition(".")[0]
_SILENT = (__name__.rpartition(".")[0], "contextlib")  # frames that say nothing about the caller
_RUNNERS = ("threading", "concurrent.futures.thread")  # they start threads and make no calls

Place = tuple[types.CodeType, int]  # a code object and an instruction offset in it


class Note(NamedTuple):
    """Facts about a call beyond its signature; unknown ones are empty."""

    shape: str  # the array's: "2, 500"; "()" for a number
    site: str  # the caller's line: "train.py:31"
    call_text: str = ""  # the caller's text, if the transport's signature lacks it

    def pack(self) -> bytes:
        """Encode in at most `NOTE_BYTES`; a long path keeps its end."""
        shape = self.shape.encode()[:_SHAPE_BYTES]
        call_text = self.call_text.encode()[:TEXT_BYTES]
        site = self.site.encode()
        most = NOTE_BYTES - len(shape) - len(call_text) - 2
        end = site if len(site) <= most else b"..." + site[3 - most :]
        return b"\n".join((shape, call_text, end))

    @staticmethod
    def unpack(data: bytes) -> Note:
        shape, call_text, site = (*data.decode(errors="replace").split("\n", 2), "", "")[:3]
        return Note(shape, site, call_text)


def note(x: Array | None, out: Array | None, call_text: str = "") -> bytes:
    """Return the packed note of a call of these arrays that is being made now.

    Args:
        call_text: The caller's text, if the note must carry it; it includes the shapes.
    """
    array = x if x is not None else out
    shape = "" if array is None or call_text else shape_text(array)
    return Note(shape, text(*place()), call_text).pack()


def shape_text(array: Array) -> str:
    """Format an array's shape for a note."""
    return str(array.shape)[1:-1] or "()"


def place() -> Place:
    """Find the caller: the nearest frame outside this package and contextlib.

    A thread that the package started has no such frame. Then the nearest frame outside the
    collectives counts.
    """
    frame: types.FrameType | None = sys._getframe(1)
    nearest = first = frame
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_SILENT):
            nearest = frame if nearest is first else nearest
            if not module.startswith(_PACKAGE) or module[len(_PACKAGE) :][:1] not in ("", "."):
                if module not in _RUNNERS:
                    return frame.f_code, frame.f_lasti
                break
        frame = frame.f_back
    assert nearest is not None, "this function has a frame"
    return nearest.f_code, nearest.f_lasti


@functools.lru_cache(maxsize=1024)
def text(code: types.CodeType, instruction: int) -> str:
    """Format a place as file:line; files in the working folder get a relative path."""
    lines = (line for low, high, line in code.co_lines() if low <= instruction < high)
    file = code.co_filename
    with contextlib.suppress(OSError, ValueError):  # the folder was removed
        near = os.path.relpath(file)
        file = near if os.path.isabs(file) and not near.startswith(os.pardir) else file
    return f"{file}:{next(lines, None) or code.co_firstlineno}"
