"""Asynchronous devices for tests: a thread for each stream, and poisoned memory."""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allreduce.devices as devices
from allreduce.devices import Buffer, Device, DeviceName, Event, Stream, registry
from allreduce.devices.base import ALIGNMENT, Runtime
from allreduce.graph.core.op_table import Op

DEADLINE = 40.0  # seconds that anything may take
POISON = 0xFF  # of floats, a NaN; of integers -1


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process four such devices, GPU:0 to GPU:3, besides its CPUs."""
    monkeypatch.setitem(registry.RUNTIMES, "GPU", f"{__name__}:FarRuntime")
    registry.made.cache_clear()
    monkeypatch.setattr(devices._here, "_logical", None)
    monkeypatch.setattr(Op, "kernel", lambda self, _: self.cpu)
    monkeypatch.setattr(Op, "runs_on", lambda self, kind: kind == "CPU" or not self.host)


def device(name: str) -> FarDevice:
    """Return one of them."""
    found = devices.lookup(name)
    assert isinstance(found, FarDevice)
    return found


class FarEvent(Event):
    """Like CUDA's: a wait refers to the latest record before it."""

    def __init__(self) -> None:
        self.reached: threading.Event | None = None
        self.stream: FarStream | None = None

    def done(self) -> bool:
        return self.reached is None or self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached is None or self.reached.wait(DEADLINE), "never reached"
        if self.stream is not None and self.stream.failure is not None:
            raise self.stream.failure


class FarStream(Stream):
    """A thread that does one thing after the other, dawdles, and stops where `gate` is closed."""

    def __init__(self, device: FarDevice, name: str) -> None:
        super().__init__(device, name)
        self.gate = threading.Event()
        self.gate.set()
        self.done = 0  # launches
        self.failure: BaseException | None = None
        self._random = random.Random(name)
        self._given: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        with np.errstate(all="ignore"):
            while True:
                work = self._given.get()
                try:
                    work()
                except BaseException as error:
                    self.failure = self.failure or error
                del work

    def launch(self, work: Callable[..., object], *arguments: Any) -> None:
        # Bare, so that nothing stays because it is waited for here.
        bare = [_bare(self.device, each) for each in arguments]

        def do() -> None:
            assert self.gate.wait(DEADLINE), "never let go"
            time.sleep(self._random.choice((0.0, 0.0, 0.0, 1e-4, 1e-3)))
            work(*bare)
            self.done += 1

        self._given.put(do)

    def until(self, launches: int) -> None:
        """Wait until it has done so many."""
        end = time.monotonic() + DEADLINE
        while self.done < launches:
            assert time.monotonic() < end, f"{self.done} of {launches}"
            time.sleep(1e-4)

    def record(self, event: Event) -> None:
        assert isinstance(event, FarEvent)
        event.reached, event.stream = (reached := threading.Event()), self
        self._given.put(reached.set)

    def wait(self, event: Event) -> None:
        assert isinstance(event, FarEvent)
        if event.reached is not None:
            reached = event.reached
            self._given.put(lambda: reached.wait(DEADLINE))

    def synchronize(self) -> None:
        self.record(event := FarEvent())
        event.synchronize()


class FarDevice(Device):
    """Separate memory, which is filled with NaN when it is freed."""

    def __init__(self, name: DeviceName) -> None:
        super().__init__(name)
        self.pieces: list[np.ndarray] = []  # all that there ever were: late uses find poison there
        self._free: list[np.ndarray] = []

    def allocate(self, nbytes: int, contents: Any = (), *, zero: bool = True) -> Buffer:
        fitting = [i for i, raw in enumerate(self._free) if len(raw) == nbytes + ALIGNMENT]
        if fitting:
            raw = self._free.pop(fitting[0])
        else:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
            self.pieces.append(raw)
        raw.fill(0)
        owner = _Lies(raw)
        weakref.finalize(owner, self._let_go, raw).atexit = False
        flat = np.asarray(owner)
        skip = -raw.ctypes.data % ALIGNMENT
        return Buffer(flat[skip : skip + nbytes], self)

    def _let_go(self, raw: np.ndarray) -> None:
        raw.fill(POISON)
        self._free.append(raw)

    def adopt(self, array: Any) -> Any:
        return np.asarray(array).reshape(-1).view(np.uint8)

    def holds(self, array: Any) -> bool:
        start = array.__array_interface__["data"][0]
        return any(0 <= start - raw.ctypes.data < len(raw) for raw in self.pieces)

    def copy(self, target: Any, source: Any, stream: Stream | None = None) -> None:
        assert stream is not None
        stream.launch(np.copyto, target, source)

    def stream(self, name: str) -> FarStream:
        return FarStream(self, name)

    def own(self, kind: str) -> FarStream:
        found = super().own(kind)
        assert isinstance(found, FarStream)
        return found

    def event(self) -> FarEvent:
        return FarEvent()


class FarRuntime(Runtime):
    """Four of them."""

    kind = "GPU"

    def count(self) -> int:
        return 4

    def open(self, name: DeviceName, physical: int) -> FarDevice:
        return FarDevice(name)

    def update(self, rule: Any, kind: type) -> Callable[..., None]:
        update: Callable[..., None] = rule.update
        return update


class _Lies:
    """Says where an array lies, and has no reference to it."""

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__


def _bare(device: Device, value: Any) -> Any:
    """Return an argument without a reference to the memory that it has on the device."""
    if isinstance(value, dict):
        return {name: _bare(device, each) for name, each in value.items()}
    if isinstance(value, list):
        return [_bare(device, each) for each in value]
    if isinstance(value, np.ndarray) and device.holds(value):
        return np.asarray(_Lies(value))
    return value
