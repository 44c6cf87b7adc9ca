"""One item ahead: a thread makes the next batch while the caller works on this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from allreduce import events

T = TypeVar("T")
# A source that blocks for good (a dead network file system) must not block its caller's exit as
# well; its thread is a daemon and ends with the process.
_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


@dataclass(slots=True)
class _Channel(Generic[T]):
    """What the two sides share; the thread thereby knows nothing of the iterator that it serves."""

    made: queue.SimpleQueue[_Item[T] | _End] = field(default_factory=queue.SimpleQueue)
    wanted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))
    stopped: bool = False


def ahead(items: Iterable[T]) -> Generator[T, None, None]:
    """Iterate `items`, the next one of which a thread makes while the caller uses the last.

    An exception in `items` reaches the caller in place of the item that it concerns. The thread
    ends when this iterator is exhausted, closed or collected; it then closes `items`' own iterator.
    """
    channel: _Channel[T] = _Channel()
    thread = threading.Thread(
        target=_produce, args=(items, channel), name="allreduce-data", daemon=True
    )
    thread.start()
    try:
        while isinstance(got := _next(channel), _Item):
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


def _next(channel: _Channel[T]) -> _Item[T] | _End:
    with events.span("wait for a batch", stream="input"):
        return channel.made.get()


def _produce(items: Iterable[T], channel: _Channel[T]) -> None:
    error: BaseException | None = None
    try:
        iterator = iter(items)
        try:
            while channel.wanted.acquire() and not channel.stopped:
                with events.span("make a batch", stream="input"):
                    item = next(iterator)
                channel.made.put(_Item(item))
                del item
        except StopIteration:
            pass
        finally:
            if close := getattr(iterator, "close", None):
                close()
    except BaseException as raised:  # whatever it is, it belongs to the caller
        error = raised
    channel.made.put(_End(error))
