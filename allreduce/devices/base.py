"""The interface of a kind of device: runtime, devices, streams, events and buffers.

A new kind is one file or folder with a `Runtime`, its `Device`, `Stream` and `Event`, and one row
in `registry.RUNTIMES`. Arrays are the kind's own (`numpy.ndarray` on CPUs), with NumPy's shapes,
dtypes and views.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from allreduce.devices.budget import Budget, Contents
from allreduce.devices.clipping import set_divisor, sum_of_squares
from allreduce.devices.integers import integer
from allreduce.devices.names import DeviceName
from allreduce.errors import ShapeError, UsageError, did_you_mean

# Bytes: a cache line, and the widest vector register, so that kernels may use aligned accesses.
ALIGNMENT = 64

COLLECTIVE = "collective"  # a device's stream that all its communicators share


class Event(ABC):
    """A point in a stream's work; other streams and the host can wait until it is reached."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the work before the last `Stream.record` of this event is finished."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until that work is finished."""


class Stream(ABC):
    """Work that a device does in order; the work of different streams may overlap.

    Attributes:
        passed: The latest step's last use of its memory on this stream, which later steps wait
            for; None before the first step, and on streams that finish work at once.
    """

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self.passed: Event | None = None
        self._held = deque[tuple[Event, tuple[Any, ...]]]()
        self._holding = threading.Lock()

    @abstractmethod
    def launch(self, work: Callable[..., object], *arguments: Any) -> None:
        """Enqueue `work(*arguments)`; does not block the host.

        Args:
            work: Computes on arrays of the device; called now to enqueue kernels, or when the
                stream reaches it.
            arguments: The caller keeps them alive until then, by `hold` or otherwise.
        """

    def launch_custom(self, work: Callable[..., object], *arguments: Any) -> None:
        """As `launch`, of a user's function, which may use the arrays' own library.

        What that library enqueues meanwhile goes to this stream, too.
        """
        self.launch(work, *arguments)

    def rehearse(self, work: Callable[..., object], *arguments: Any) -> bool:  # noqa: ARG002
        """Prepare for `launch` of the same: take memory and load code, but change nothing.

        Args:
            work: Is called now, on streams that prepare something, and computes nothing.
            arguments: May be `Device.blank` arrays.

        Returns:
            Whether `launch` finds everything loaded.
        """
        return True

    def rehearse_custom(
        self,
        kernel: Callable[..., object],  # noqa: ARG002
        out: Any,  # noqa: ARG002
        inputs: Sequence[Any],  # noqa: ARG002
        attrs: Mapping[str, Any],  # noqa: ARG002
    ) -> bool:
        """As `rehearse`, of a user's kernel: it is called once, on arrays of zeros.

        Args:
            kernel: Called as `Op.cpu`, on other arrays like `out` and `inputs`.
            out: An array like the one that the step will have it write to; may be blank.
            inputs: Arrays like those that it will read; may be blank.
            attrs: The operator's attributes.

        Returns:
            Whether the kernel has returned, so that `launch_custom` finds what it uses loaded.
        """
        return True

    @abstractmethod
    def record(self, event: Event) -> None:
        """Set `event` to the end of the work enqueued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for `event`; does not block the host."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until all enqueued work is finished."""

    def hold(self, *objects: Any) -> Event:
        """Keep objects alive until the work enqueued so far is finished.

        Returns:
            The event at its end.
        """
        event = self.device.event()
        self.record(event)
        with self._holding:  # the prefetch thread uses the streams, too
            self._held.append((event, objects))
        self.let_go()
        return event

    def let_go(self) -> None:
        """Release the objects held for finished work."""
        gone = []  # released after the lock: destructors may run
        with self._holding:
            while self._held and self._held[0][0].done():
                gone.append(self._held.popleft())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self.device.name.local}>"


class Device(ABC):
    """A place with memory that executes work.

    Attributes:
        reads_host: Whether its work can use arrays in the host's memory directly.
        guards: Called before a value of the device reaches the host; they raise if the work behind
            it has failed without a trace in the value.
    """

    reads_host = False

    def __init__(self, name: DeviceName) -> None:
        if not name.is_complete:
            raise UsageError(f"a device needs a complete name; {str(name)!r} leaves fields open")
        self.name = name
        self.memory = Budget(str(name))
        self.guards: list[Callable[[], None]] = []
        self._own: dict[str, Stream] = {}
        self._owning = threading.Lock()

    @property
    def kind(self) -> str:
        """`CPU`, `GPU`, …"""
        return str(self.name.kind)

    @property
    def index(self) -> int:
        """Which of its kind this is in its task, from 0."""
        return int(self.name.index or 0)

    @abstractmethod
    def allocate(self, nbytes: int, contents: Contents = (), *, zero: bool = True) -> Buffer:
        """Make a private Buffer of zeros, aligned to `ALIGNMENT` bytes.

        Args:
            nbytes: Its size.
            contents: Its purpose, as errors list it.
            zero: Whether it must hold zeros; otherwise it may hold anything.

        Raises:
            OutOfMemoryError: The memory, or the device's limit, is exhausted; the message names
                device, bytes, and the largest parts in use.
        """

    def allocate_result(self, nbytes: int) -> Buffer:
        """As `allocate`, for an array that the program gets and may use on streams of its own."""
        return self.allocate(nbytes, zero=False)

    def reserve(self, nbytes: int, count: int) -> None:  # noqa: B027
        """Take memory for so many copies from the host at a time; they allocate none then.

        Args:
            nbytes: Of each.
            count: How many.
        """

    @abstractmethod
    def adopt(self, array: Any) -> Any:
        """Return the flat byte array over `array`'s memory; no copy; its owner stays alive.

        Raises:
            UsageError: The memory is not on this device, or not one contiguous piece.
        """

    @abstractmethod
    def copy(self, target: Any, source: Any, stream: Stream | None = None) -> None:
        """Copy between arrays or Buffers, at least one of them on this device.

        Args:
            target: Written; of the same shape and dtype as `source`.
            source: Read; may overlap `target`.
            stream: Where the copy is ordered; None: finished on return.
        """

    @abstractmethod
    def holds(self, array: Any) -> bool:
        """Return whether the device can use an array without a copy."""

    def accepts(self, array: Any) -> bool:
        """Return whether steps can use an array as it is: it lies here as rehearsals assume."""
        return self.holds(array)

    def took(self, array: Any) -> bool:
        """Return whether an array that it holds lies in its memory, and not a sibling's.

        Siblings are other logical devices of the same physical one.
        """
        return self.holds(array)

    def borrows(self, array: Any) -> bool:  # noqa: ARG002
        """Return whether another library's array lies here, so that `view` makes it usable."""
        return False

    def view(
        self,
        array: Any,
        stream: Stream | None = None,  # noqa: ARG002
        *,
        written: bool = False,  # noqa: ARG002
    ) -> Any:
        """Return an array that this device `borrows` as one of its own, without a copy.

        Args:
            array: The other library's; an own one is returned as it is.
            stream: The stream that will use it, which is ordered behind the array's producer.
            written: Whether it will be written.

        Raises:
            UsageError: It is read-only and will be written, or its library does not describe it.
        """
        return array

    def address(self, flat: Any) -> int:
        """Return the address of an array's first byte, in the device's address space."""
        return int(flat.__array_interface__["data"][0])

    def read(self, array: Any, *, ready: bool = False) -> npt.NDArray[Any]:  # noqa: ARG002
        """Copy an array to new host memory, after all work that the device was given before.

        Args:
            array: The array.
            ready: Whether the work that computes it is known to be finished.
        """
        found: npt.NDArray[Any] = array.copy()
        return found

    def write(self, target: Any, value: Any) -> None:
        """Set an array from a host or device array or a number; complete on return."""
        target[...] = value

    def assign(self, target: Any, value: Any) -> None:
        """Set an array from one of this device, or from a number; called by `Stream.launch`."""
        target[...] = value

    def accumulate(self, target: Any, value: Any) -> None:
        """As `assign`, but add to the array."""
        target += value

    def clip(self, divisor: Any, gradients: Any, count: Any, limit: float) -> None:
        """Set what to divide gradients by so that the norm of their mean is `limit` at most.

        Called by `Stream.launch`.

        Args:
            divisor: Set; as for `clipping.set_divisor`.
            gradients: Sums over samples, `(n,)`.
            count: The number of samples, `(1,)`.
            limit: The largest norm.
        """
        set_divisor(divisor, count, sum_of_squares([gradients]), limit)

    def blank(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return an array without memory, or with any, for `Stream.rehearse`."""
        return np.empty(shape, dtype)

    def check(self) -> None:  # noqa: B027  # few kinds of devices find errors late
        """Raise what the device's finished work has found wrong in its inputs."""

    def confirm(self) -> None:
        """Raise what `guards` find, before a value of finished work reaches the host."""
        for guard in list(self.guards):
            guard()

    def constant(self, value: npt.NDArray[Any]) -> Any:
        """Return a host array as one that the device's work can use and nothing changes."""
        return value

    def number(self, value: npt.NDArray[Any], stream: Stream) -> Any:  # noqa: ARG002
        """As `constant`, for one step's number, ordered on a stream."""
        return value

    def host_empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Allocate a host array that copies from the device go to."""
        return np.empty(shape, dtype)

    def keep(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array of `host_empty` as one that a program may keep for long."""
        return array

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """Make a stream; `name` ("compute", "collective") is for people."""

    def own(self, kind: str) -> Stream:
        """Return the device's stream for one kind of work; all programs share it."""
        with self._owning:
            if kind not in self._own:
                self._own[kind] = self.stream(kind)
            return self._own[kind]

    @property
    def identity(self) -> str:
        """The name of the physical device, equal in all processes that use it; empty if unknown."""
        return ""

    @property
    def in_use(self) -> bool:
        """Whether it has given memory away, or has streams."""
        return bool(self.memory.used or self._own)

    def streams(self) -> list[Stream]:
        """List its own streams that have been asked for."""
        with self._owning:
            return list(self._own.values())

    def synchronize(self) -> None:
        """Block the calling thread until the work on its own streams is finished.

        Not for collectives: a dead member would block it for ever. Their works' waits watch.
        """
        for each in self.streams():
            if each.name != COLLECTIVE:
                each.synchronize()

    def order_behind_all(self, stream: Stream) -> None:
        """Have a stream wait for all work that the device's other streams have been given."""
        for other in self.streams():
            if other is not stream:
                event = self.event()
                other.record(event)
                stream.wait(event)

    def order_caller(self, event: Event) -> None:  # noqa: B027
        """Have the stream that the caller's array library enqueues on wait for an event.

        Args:
            event: After the last use of arrays that the caller may now write to.
        """

    @abstractmethod
    def event(self) -> Event:
        """Make an event that has not been recorded yet."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class Runtime(ABC):
    """One kind of device on this machine: how many there are, and the devices over them."""

    kind: str

    @abstractmethod
    def count(self) -> int:
        """Count the physical devices of this kind that this process can use; cheap, no set-up."""

    @abstractmethod
    def open(self, name: DeviceName, physical: int) -> Device:
        """Make the logical device `name` on the physical device number `physical`."""

    def absence(self) -> str:
        """Return why there is no device of this kind, and what to do; empty if there are some."""
        return ""

    def identities(self) -> tuple[str, ...]:
        """Name the physical devices, equally in all processes that share them.

        Empty for a kind that processes need not share out.
        """
        return ()

    def kernel(self, operator: str) -> Callable[..., object] | None:  # noqa: ARG002
        """Return the kernel of one of the library's operators, called as `Op.cpu` is."""
        return None

    def update(self, rule: Any, kind: type) -> Callable[..., None] | None:  # noqa: ARG002
        """Return an optimizer's update of a range of an arena, called as its `update` is.

        Args:
            rule: The optimizer, or a group's view of it.
            kind: The optimizer's class.
        """
        return None


class Buffer:
    """Bytes on one Device, private or symmetric (mapped by all members); arrays are views of it."""

    __slots__ = ("_bytes", "device", "nbytes", "symmetric")

    def __init__(self, flat: Any, device: Device, *, symmetric: bool = False) -> None:
        """Hold `flat`, the device's one-dimensional array of uint8."""
        self._bytes = flat
        self.device = device
        self.nbytes = int(flat.size)
        self.symmetric = symmetric

    @classmethod
    def of(cls, array: Any, device: Device, *, symmetric: bool = False) -> Buffer:
        """Wrap existing memory without copying; its owner stays alive.

        Args:
            array: Contiguous memory: an ndarray, or an object with an array interface, DLPack or
                the buffer protocol. Read-only memory gives read-only views.
            symmetric: All members of a communicator have mapped it; only its maker knows.
        """
        return cls(device.adopt(array), device, symmetric=symmetric)

    def array(self, dtype: npt.DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> Any:
        """View a part as an array of the device's library; it keeps the memory alive.

        Args:
            offset: Where the view starts, in bytes; aligned for `dtype`.

        Raises:
            ShapeError: The view would reach outside, or elements would be misaligned.
            UsageError: There is no such dtype, or something is no integer.
        """
        try:
            kind = np.dtype(dtype)
        except TypeError:
            near = did_you_mean(dtype, np.sctypeDict)
            raise UsageError(f"{dtype!r} is no dtype that NumPy knows{near}") from None
        extents = shape if isinstance(shape, tuple | list) else (shape,)
        shape = tuple(integer("an extent of a view's shape", extent) for extent in extents)
        offset = integer("a view's offset in bytes", offset)
        if kind.hasobject:
            raise ShapeError(f"a Buffer holds bytes; it has no views of dtype {kind}")
        if offset < 0 or any(extent < 0 for extent in shape):
            raise ShapeError(f"shape {shape} at offset {offset}: neither may be negative")
        end = offset + math.prod(shape) * kind.itemsize
        if end > self.nbytes:
            raise ShapeError(
                f"{kind} of shape {shape} at offset {offset} ends at byte {end}, but {self!r} ends "
                f"at {self.nbytes}"
            )
        if (self.address + offset) % kind.alignment:
            raise ShapeError(
                f"offset {offset} is not aligned for {kind}: address {self.address + offset:#x} "
                f"is no multiple of {kind.alignment} bytes"
            )
        return self._bytes[offset:end].view(kind).reshape(shape)

    @property
    def address(self) -> int:
        """The address of the first byte, in the device's address space."""
        return self.device.address(self._bytes)

    @property
    def bytes(self) -> Any:
        """All of it as a flat array of uint8."""
        return self._bytes

    def __repr__(self) -> str:
        kind = "symmetric" if self.symmetric else "private"
        return f"<{kind} Buffer of {self.nbytes} bytes on {self.device.name.local}>"
