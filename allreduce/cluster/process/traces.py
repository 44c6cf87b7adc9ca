"""Texts of errors, the chains of their causes, and the user's lines in their tracebacks."""

from __future__ import annotations

import contextlib
import linecache
import os
import traceback
from collections.abc import Iterator

from allreduce.errors import is_user_code


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes; `raise error from error` makes a circle."""
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def text(error: BaseException) -> str:
    """Write an error as Python does, with its traceback and causes."""
    return "".join(traceback.format_exception(error))


def summary(error: BaseException) -> str:
    """Write an error in one line: "ValueError: no such file (train.py:12, in read)"."""
    lines = traceback.format_exception_only(error)
    # A SyntaxError's first lines are the place, indented.
    named = next(each for each in lines if not each.startswith(" ")).partition("\n")[0]
    place = users_line(error)
    return named if place is None else f"{named} ({place})"


def users_line(error: BaseException, *, source: bool = False) -> str | None:
    """Return the innermost line of the user's program in an error's traceback, or in its causes'.

    Args:
        source: Whether the text of the line follows.

    Returns:
        "train.py:12, in read: text = path.read_text()"; None if there is no such line.
    """
    for each in causes(error):
        frames = list(traceback.walk_tb(each.__traceback__))
        for frame, number in reversed(frames):
            if is_user_code(frame):
                code = frame.f_code
                place = f"{_relative(code.co_filename)}:{number}"
                if code.co_name != "<module>":
                    place += f", in {code.co_name}"
                text = linecache.getline(code.co_filename, number).strip() if source else ""
                return f"{place}: {text}" if text else place
    return None


def ends_in_library(error: BaseException) -> bool:
    """Return whether a traceback ends in frames that are not of the user's program."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and not is_user_code(frames[-1])


def _relative(path: str) -> str:
    """Shorten the path of a file below the working directory."""
    with contextlib.suppress(OSError):  # the working directory has been deleted
        return path.removeprefix(os.getcwd() + os.sep)
    return path
