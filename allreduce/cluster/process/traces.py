"""Texts of errors, and the chains of their causes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator


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
