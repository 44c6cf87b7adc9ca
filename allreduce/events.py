"""Log records, and spans of time that are reported to subscribers."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

logger = logging.getLogger("allreduce")


class Event(NamedTuple):
    """A span of time."""

    name: str
    start: float  # time.perf_counter() seconds
    seconds: float
    fields: dict[str, Any]


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every Event; call the returned function to unsubscribe."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def has_subscribers() -> bool:
    """Return whether there are subscribers; without any, skip the work for an event."""
    return bool(_listeners)


def report(name: str, start: float, seconds: float, fields: dict[str, Any]) -> None:
    """Report a span that began at `start` (in `time.perf_counter()` seconds)."""
    _emit(Event(name, start, seconds, fields))


@contextmanager
def span(name: str, **fields: Any) -> Iterator[None]:
    """Report the block as a span; without subscribers it costs one list test."""
    if not _listeners:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        _emit(Event(name, start, time.perf_counter() - start, fields))


def counted(number: int, noun: str) -> str:
    """Format a number and a noun: "1 rank", "8 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _emit(event: Event) -> None:
    for listener in tuple(_listeners):
        listener(event)


class _RankFilter(logging.Filter):
    """Puts the rank into each record, so that any handler's format can show it."""

    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = "-" if self.rank is None else self.rank
        record.member = "" if self.rank is None else f"rank {self.rank}: "
        return True


_rank_filter = _RankFilter()
logger.addFilter(_rank_filter)
_own_level = logging.NOTSET  # the level that we set; any other is the application's


def current_rank() -> int | None:
    """Return this process's rank, once it has joined."""
    return _rank_filter.rank


def configure_logging(rank: int | None, level: str | None = None) -> None:
    """Log to stderr with the rank: INFO on rank 0, WARNING on others.

    The application's handlers and level of the `allreduce` logger are kept; `level` overrides the
    latter. Before this process has joined (no rank), records also go to the application's root
    handlers, if there are any, from INFO on.
    """
    global _own_level
    _rank_filter.rank = rank
    if level is not None or logger.level in (logging.NOTSET, _own_level):
        logger.setLevel(level or ("WARNING" if rank else "INFO"))
        _own_level = logger.level
    if not (logger.hasHandlers() if rank is None else logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[allreduce] %(member)s%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
