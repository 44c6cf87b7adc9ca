"""One item ahead: a thread makes the next batch while the caller works on this one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from allreduce import events
from allreduce.devices import options

T = TypeVar("T")
# Hears of each item how many seconds it took to make, and how many of them its caller waited.
Note = Callable[[float, float], None]
# A source that blocks for good (a dead network file system) must not block its caller's exit as
# well; its thread is a daemon and ends with the process.
_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T
    seconds: float  # that it took


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


@dataclass(slots=True)
class _Channel(Generic[T]):
    """What the two sides share; the thread thereby knows nothing of the iterator that it serves."""

    made: queue.SimpleQueue[_Item[T] | _End] = field(default_factory=queue.SimpleQueue)
    wanted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))
    stopped: bool = False


def ahead(items: Iterable[T], note: Note | None = None) -> Generator[T, None, None]:
    """Iterate `items`, the next one of which a thread makes while the caller uses the last.

    An exception in `items` reaches the caller in place of the item that it concerns. The thread
    ends when this iterator is exhausted, closed or collected; it then closes `items`' own iterator.
    There is none without `ar.config.set_pipelining`.
    """
    if not options.current().pipelining:
        yield from in_turn(items, note)
        return
    channel: _Channel[T] = _Channel()
    thread = threading.Thread(
        target=_produce, args=(items, channel), name="allreduce-data", daemon=True
    )
    thread.start()
    try:
        while True:
            start = time.perf_counter()
            got = channel.made.get()
            if not isinstance(got, _Item):
                break
            waited = _since(start, "wait for a batch")  # for the end there is no batch to wait for
            if note is not None:
                note(got.seconds, waited)
            channel.wanted.release()
            yield got.value
            del got  # the caller alone decides how long the batch lives
        if got.error is not None:
            raise got.error
    finally:
        channel.stopped = True
        channel.wanted.release()
        if thread is not threading.current_thread():  # a collector may run this anywhere
            thread.join(_PATIENCE)


def in_turn(items: Iterable[T], note: Note | None = None) -> Generator[T, None, None]:
    """Iterate `items`, each of which is made when the caller wants it."""
    iterator = iter(items)
    try:
        while True:
            start = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            seconds = _since(start, "make a batch")
            if note is not None:
                note(seconds, seconds)
            yield item
            del item
    finally:
        if close := getattr(iterator, "close", None):
            close()


def _since(start: float, name: str) -> float:
    """Report what began at `start` and has just ended; returns its seconds."""
    seconds = time.perf_counter() - start
    if events.heard():
        events.report(name, start, seconds, {"stream": "input"})
    return seconds


def _produce(items: Iterable[T], channel: _Channel[T]) -> None:
    error: BaseException | None = None
    try:
        iterator = iter(items)
        try:
            while channel.wanted.acquire() and not channel.stopped:
                start = time.perf_counter()
                item = next(iterator)
                channel.made.put(_Item(item, _since(start, "make a batch")))
                del item
        except StopIteration:
            pass
        finally:
            if close := getattr(iterator, "close", None):
                close()
    except BaseException as raised:  # whatever it is, it belongs to the caller
        error = raised
    channel.made.put(_End(error))
