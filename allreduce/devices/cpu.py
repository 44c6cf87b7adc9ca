"""The CPU of this process: NumPy arrays, and streams that do everything at once.

A logical CPU device is a name for a share of the same cores and memory: several of them let one
process hold several replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from allreduce.devices.base import ALIGNMENT, Buffer, Device, Event, Runtime, Stream
from allreduce.devices.budget import Contents
from allreduce.devices.integers import integer
from allreduce.devices.names import DeviceName
from allreduce.errors import InternalError, OutOfMemoryError, ShapeError, UsageError

_DLPACK_HOST_MEMORY = (1, 3)  # kDLCPU and kDLCUDAHost (pinned), the first half of __dlpack_device__


class CpuEvent(Event):
    """A mark that is reached when it is recorded, because a CPU stream has nothing pending."""

    def __init__(self) -> None:
        self._recorded = False

    def mark(self) -> None:
        self._recorded = True

    def done(self) -> bool:
        return self._recorded

    def synchronize(self) -> None:
        """Return at once.

        Raises:
            InternalError: Nothing has recorded it, so that waiting would never end.
        """
        if not self._recorded:
            raise InternalError("a wait for an event that no stream has recorded would never end")


class CpuStream(Stream):
    """A stream that runs work at once, on the calling thread.

    An event is therefore complete when recorded. Waiting for one checks the order of the program:
    on a device with real streams, a wait before the record would be a race.
    """

    def launch(self, work: Callable[..., object], *arguments: Any) -> None:
        work(*arguments)

    def record(self, event: Event) -> None:
        _own(event).mark()

    def wait(self, event: Event) -> None:
        _own(event).synchronize()

    def synchronize(self) -> None:
        """Return at once: nothing is pending."""


class CpuDevice(Device):
    """A logical CPU."""

    reads_host = True

    def allocate(
        self,
        nbytes: int,
        contents: Contents = (),
        *,
        zero: bool = True,  # noqa: ARG002  # fresh pages are
    ) -> Buffer:
        nbytes = integer("a Buffer's size in bytes", nbytes, 0)
        taken = self.memory.take(nbytes, contents)
        try:
            # Fresh pages are zero already: nothing is touched until it is used.
            raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: beyond the address space
            self.memory.give_back(taken)
            raise OutOfMemoryError(
                f"no memory on {self.name} for {nbytes} bytes ({nbytes / 2**30:.1f} GiB); "
                f"use a smaller model or batch, or fewer replicas per host"
                f"{self.memory.largest(contents)}"
            ) from error
        self.memory.until_gone(taken, raw)
        skip = -raw.__array_interface__["data"][0] % ALIGNMENT
        return Buffer(raw[skip : skip + nbytes], self)

    def adopt(self, array: Any) -> npt.NDArray[np.uint8]:
        view = _share(array)
        if view.dtype.hasobject:
            raise UsageError(f"{_what(array)} holds Python objects, not bytes")
        if not view.flags.c_contiguous:
            raise UsageError(
                f"{_what(array)} of shape {view.shape} is not one piece of memory "
                f"(strides {view.strides} bytes); pass np.ascontiguousarray(...) of it"
            )
        return view.reshape(-1).view(np.uint8)

    def copy(self, target: Any, source: Any, stream: Stream | None = None) -> None:  # noqa: ARG002
        to = target.bytes if isinstance(target, Buffer) else target
        come = source.bytes if isinstance(source, Buffer) else source
        if to.shape != come.shape or to.dtype != come.dtype:
            raise ShapeError(
                f"a copy needs equal shapes and dtypes, not {come.dtype} {come.shape} "
                f"into {to.dtype} {to.shape}"
            )
        np.copyto(to, come)

    def holds(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def stream(self, name: str) -> CpuStream:
        return CpuStream(self, name)

    def event(self) -> CpuEvent:
        return CpuEvent()


class CpuRuntime(Runtime):
    """All cores that this process may use, as one physical device."""

    kind = "CPU"

    def count(self) -> int:
        return 1

    def open(self, name: DeviceName, physical: int) -> CpuDevice:
        if physical != 0:
            raise InternalError(f"there is one physical CPU per process, not number {physical}")
        return CpuDevice(name)


def _own(event: Event) -> CpuEvent:
    if not isinstance(event, CpuEvent):
        raise InternalError(f"a CPU stream has no use for a {type(event).__name__}")
    return event


def _share(array: Any) -> npt.NDArray[Any]:
    """Return an ndarray over the same memory, by whichever protocol `array` speaks."""
    if isinstance(array, np.generic):
        raise UsageError(f"{_what(array)} is a scalar without its own memory; pass an array")
    if isinstance(array, np.ndarray):
        return array.view(np.ndarray)
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    if hasattr(array, "__dlpack_device__"):
        place = array.__dlpack_device__()[0]
        if place not in _DLPACK_HOST_MEMORY:
            raise UsageError(
                f"{_what(array)} is not in host memory (DLPack device type {int(place)}); "
                "copy it to the host first"
            )
        return np.from_dlpack(array, copy=False)
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        raise UsageError(
            f"{_what(array)} offers no memory: an ndarray, or an object with "
            "__array_interface__, __dlpack__ or the buffer protocol, is needed"
        ) from None


def _what(array: object) -> str:
    return f"a {type(array).__module__}.{type(array).__qualname__}"
