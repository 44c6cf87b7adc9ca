"""Prefetch: a thread makes the next batch during a step and copies it to the devices."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from allreduce import events
from allreduce.devices import lookup, options
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.schedule.streams import TO_DEVICE

T = TypeVar("T")
# Called per item with the seconds it took to make, and the seconds its caller waited.
Note = Callable[[float, float], None]
# Seconds to join the thread. A source that blocks forever (a dead network file system) must not
# block the exit; its thread is a daemon.
_JOIN_SECONDS = 5.0
_BATCHES = 3  # in use at once: of the step that runs, of the one before it, and the next


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T
    seconds: float  # to make it


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


@dataclass(slots=True)
class _Channel(Generic[T]):
    """State shared by both sides; without a reference to the iterator, which can be collected."""

    made: queue.SimpleQueue[_Item[T] | _End] = field(default_factory=queue.SimpleQueue)
    wanted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))
    stopped: bool = False


def prefetch(items: Iterable[T], note: Note | None = None) -> Generator[T, None, None]:
    """Iterate `items`; a thread makes the next item while the caller uses the current one.

    An exception in `items` is raised in place of its item. The thread ends when this iterator is
    exhausted, closed or collected, and then closes `items`' own iterator. If
    `ar.config.set_pipelining` is off, there is no thread.
    """
    if not options.current().pipelining:
        yield from on_demand(items, note)
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
            waited = _since(start, "wait for a batch")  # not reported for the end
            if note is not None:
                note(got.seconds, waited)
            channel.wanted.release()
            yield got.value
            del got  # only the caller keeps the batch alive
        if got.error is not None:
            raise got.error
    finally:
        channel.stopped = True
        channel.wanted.release()
        if thread is not threading.current_thread():  # the garbage collector may run this anywhere
            thread.join(_JOIN_SECONDS)


def on_demand(items: Iterable[T], note: Note | None = None) -> Generator[T, None, None]:
    """Iterate `items`, making each when the caller asks for it."""
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
    """Report a span from `start` to now; returns its seconds."""
    seconds = time.perf_counter() - start
    if events.has_subscribers():
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
    except BaseException as raised:  # raised again in the caller
        error = raised
    channel.made.put(_End(error))


class Stager:
    """Copies batches to devices that cannot read the host's memory.

    The thread that makes the next batch waits for the copies before it hands the batch over. Each
    batch has memory of its own, so no step waits for a copy or has its inputs overwritten. Copies
    run on the devices' own host-to-device streams, as the steps' copies do.
    """

    def __init__(self, replicator: Replicator) -> None:
        self._devices = [lookup(name) for name in replicator.devices]
        self._streams = [
            None if device.reads_host else device.own(TO_DEVICE) for device in self._devices
        ]
        self._reserved: set[tuple[Any, ...]] = set()  # replicas and rows that there is room for
        self._began: float | None = None  # when the batch's first copy was started

    @property
    def copies(self) -> bool:
        """Whether a device cannot read the host's memory."""
        return any(stream is not None for stream in self._streams)

    def put(self, replica: int, rows: np.ndarray, *, own: bool) -> Any:
        """Start copying rows to a replica's device; complete after `finish`, called on this thread.

        Args:
            replica: Its index in this process.
            rows: In the host's memory; must not change until `finish`.
            own: Whether the rows cannot be changed later, so that no copy is needed.
        """
        device, stream = self._devices[replica], self._streams[replica]
        if stream is None:
            return rows if own else rows.copy()
        if self._began is None:
            self._began = time.perf_counter()
        kind = (replica, rows.dtype, rows.shape[1:])
        if kind not in self._reserved:  # the first batch: later ones are not larger
            self._reserved.add(kind)
            device.reserve(rows.nbytes, _BATCHES)
        there = device.allocate(rows.nbytes, zero=False).array(rows.dtype, rows.shape)
        device.copy(there, rows, stream)
        stream.hold(rows, there)  # even if the batch fails: another array may not fit
        return there

    def finish(self) -> None:
        """Wait until all copies are complete."""
        if self._began is None:
            return
        copied = [stream.hold() for stream in self._streams if stream is not None]
        for event in copied:
            event.synchronize()
        began, self._began = self._began, None
        if events.has_subscribers():
            seconds = time.perf_counter() - began
            for stream in self._streams:
                if stream is not None:
                    place = {"stream": stream.name, "device": stream.device.name.local}
                    events.report("bring a batch", began, seconds, place)
