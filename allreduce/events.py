"""What rooms report: log records, spans and counters. Who listens is not their business."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

logger = logging.getLogger("allreduce")


class Event(NamedTuple):
    """One thing that happened: a span (`seconds` > 0 possible) or a counter (`value`)."""

    name: str
    start: float  # time.perf_counter() seconds
    seconds: float
    value: float | None
    fields: dict[str, Any]


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every Event from now on; the returned function ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def heard() -> bool:
    """Whether anybody listens; what would cost more than this question is not done otherwise."""
    return bool(_listeners)


def report(name: str, start: float, seconds: float, fields: dict[str, Any]) -> None:
    """Report what has taken a while, from `start` on (`time.perf_counter()` seconds)."""
    _emit(Event(name, start, seconds, None, fields))


@contextmanager
def span(name: str, **fields: Any) -> Iterator[None]:
    """Report how long the block took; costs one list test when nobody listens."""
    if not _listeners:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        _emit(Event(name, start, time.perf_counter() - start, None, fields))


def count(name: str, value: float, **fields: Any) -> None:
    """Report a number: bytes sent, a queue's length."""
    if _listeners:
        _emit(Event(name, time.perf_counter(), 0.0, value, fields))


def counted(number: int, noun: str) -> str:
    """Write a number of things for a message: "1 rank", "8 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _emit(event: Event) -> None:
    for listener in tuple(_listeners):
        listener(event)


class _RankFilter(logging.Filter):
    """Puts the rank into each record, so that any handler's format can show it."""

    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = "-" if self.rank is None else self.rank
        return True


_rank_filter = _RankFilter()
logger.addFilter(_rank_filter)
_own_level = logging.NOTSET  # what we have set; any other level is the application's


def current_rank() -> int | None:
    """Return this process's rank, once it has joined."""
    return _rank_filter.rank


def configure_logging(rank: int | None, level: str | None = None) -> None:
    """Send the library's records to stderr with the rank: INFO on rank 0, WARNING elsewhere.

    A handler or a level that the application has given the `allreduce` logger is left alone,
    unless `level` says otherwise. Without a rank, as long as this process has not joined, they go
    where the application sends all of its records, if it does so, and INFO is among them.
    """
    global _own_level
    _rank_filter.rank = rank
    if level is not None or logger.level in (logging.NOTSET, _own_level):
        logger.setLevel(level or ("WARNING" if rank else "INFO"))
        _own_level = logger.level
    if not (logger.hasHandlers() if rank is None else logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[allreduce] rank %(rank)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
