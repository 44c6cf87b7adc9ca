"""Tracebacks in which the lines of the user's own program stand out.

A step goes through dozens of this library's functions before it comes to the line of a loss that
is wrong. If the user's lines or the message explain the error, the library's frames are folded into
one line.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from types import FrameType, TracebackType
from typing import Any

from allreduce import settings
from allreduce.errors import AllreduceError, InternalError, UsageError
from allreduce.events import current_rank, logger

_PACKAGE = __name__.partition(".")[0]
_SUGGESTING = AttributeError, NameError  # to which only Python adds suggestions
_OMITTED = "<omitted>"  # the file name in place of hidden frames


def on_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught error, shortened as `text` does if it has come through this library."""
    if sys.stderr is not None and not isinstance(error, _SUGGESTING) and _is_through_us(error):
        if current_rank() is None:  # the level may not have been read yet
            with contextlib.suppress(UsageError):
                logger.setLevel(settings.load().log_level or logger.level)
        print(text(error), end="", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _is_through_us(error: BaseException) -> bool:
    """Return whether an error or one of its causes has a frame of this library."""
    return any(
        _is_ours(frame)
        for each in causes(error)
        for frame, _ in traceback.walk_tb(each.__traceback__)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes; `raise error from error` makes a circle."""
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def text(error: BaseException) -> str:
    """Write an error as Python does, with its causes, and this library's frames as one line.

    All are shown if ALLREDUCE_LOG_LEVEL is DEBUG, and if they raise an error that is not in
    `allreduce.errors`: then the fault may be theirs.
    """
    told = traceback.TracebackException.from_exception(error)
    if not logger.isEnabledFor(logging.DEBUG):
        _shorten(told, error)
    return "".join(told.format())


def _shorten(told: traceback.TracebackException | None, error: BaseException | None) -> None:
    if told is None or error is None:
        return
    _shorten(told.__cause__, error.__cause__)
    _shorten(told.__context__, error.__context__)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [index for index, frame in enumerate(frames) if _is_users(frame)]
    if own and len(frames) == len(told.stack):
        explained = isinstance(error, AllreduceError) and not isinstance(error, InternalError)
        told.stack = _without(told.stack, frames, len(frames) if explained else own[-1])


def _without(
    stack: traceback.StackSummary, frames: list[FrameType], end: int
) -> traceback.StackSummary:
    """Replace each run of this library's frames before the frame `end` by one line."""
    kept, omitted = _Stack(), 0
    for index, (summary, frame) in enumerate(zip(stack, frames, strict=True)):
        within = omitted and frame.f_code.co_filename.startswith(_installed()[0])
        hidden = _is_ours(frame) or within
        if hidden and index < end:
            omitted += 1
            continue
        if omitted:
            kept.append(_placeholder(omitted))
            omitted = 0
        kept.append(summary)
    if omitted:
        kept.append(_placeholder(omitted))
    return kept


def _placeholder(count: int) -> traceback.FrameSummary:
    said = f"{count} line{'s' * (count != 1)} of {_PACKAGE}"
    return traceback.FrameSummary(_OMITTED, 0, said, lookup_line=False, line="")


class _Stack(traceback.StackSummary):
    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **how: Any) -> str:
        if frame_summary.filename == _OMITTED:
            return f"  ... {frame_summary.name}, which ALLREDUCE_LOG_LEVEL=DEBUG shows\n"
        return super().format_frame_summary(frame_summary, **how)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame belongs to the program, not to this or an installed package."""
    return not _is_ours(frame) and not frame.f_code.co_filename.startswith(_installed())


@cache
def _installed() -> tuple[str, ...]:
    """Return the folders of Python's own modules, then those of installed packages."""
    import sysconfig  # which no rank needs that fails nowhere

    return tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
