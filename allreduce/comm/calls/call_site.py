"""Where a call was made and of what shape: what a member tells the others for their errors.

Remembering the place costs some hundred nanoseconds: a look at each frame between the caller's and
here. It is turned into text once per place.
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
_SILENT = (__name__.rpartition(".")[0], "contextlib")  # where no line tells who wanted a call
_RUNNERS = ("threading", "concurrent.futures.thread")  # they call nothing by themselves

Place = tuple[types.CodeType, int]  # a function's code, and the offset of the instruction in it


class Note(NamedTuple):
    """What a member tells of a call beyond its signature; empty where it is not known."""

    shape: str  # of the array: "2, 500"; "()" of a number
    site: str  # the caller's line: "train.py:31"
    call_text: str = (
        ""  # what the caller wrote, where the transport's own words have no room for it
    )

    def pack(self) -> bytes:
        """Return it as bytes, at most `NOTE_BYTES`; of a long path the end counts."""
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
        x: The input, or None.
        out: The output, or None.
        call_text: What the caller wrote, if that is to be in the note: it tells the shapes, too.
    """
    array = x if x is not None else out
    shape = "" if array is None or call_text else shape_text(array)
    return Note(shape, text(*place()), call_text).pack()


def shape_text(array: Array) -> str:
    """Say an array's shape as a note does."""
    return str(array.shape)[1:-1] or "()"


def place() -> Place:
    """Find the caller: the nearest frame outside this package and contextlib.

    A thread that the package itself has started has none: then it is the nearest that is not of the
    collectives.
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
    """Say a place as file:line, relative to the working folder if the file lies in it."""
    lines = (line for low, high, line in code.co_lines() if low <= instruction < high)
    file = code.co_filename
    with contextlib.suppress(OSError, ValueError):  # no such folder any more
        near = os.path.relpath(file)
        file = near if os.path.isabs(file) and not near.startswith(os.pardir) else file
    return f"{file}:{next(lines, None) or code.co_firstlineno}"
