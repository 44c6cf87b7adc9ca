"""A GPU: its context, memory, streams, and copies from and to the host."""

from __future__ import annotations

import os
import threading
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from allreduce.devices.base import Buffer, Device, Event, Stream
from allreduce.devices.budget import Contents
from allreduce.devices.cuda import arrays, cupy_streams
from allreduce.devices.cuda.driver import api, call
from allreduce.devices.cuda.kernels import copies, elementwise, optimizers
from allreduce.devices.cuda.memory import LastUse, PinnedPool, Pool, device_pool
from allreduce.devices.cuda.streams import CudaEvent, CudaStream, current_stream
from allreduce.devices.integers import integer
from allreduce.devices.names import DeviceName
from allreduce.errors import OutOfMemoryError, ShapeError, UsageError

# What kernels find wrong in their inputs, and go on.
_FLAWS = {
    "label": (
        "the label in row {place} of the replica's batch, on {device}, is negative, or not below "
        "the number of classes; its loss is NaN"
    ),
    "index": (
        "the index at place {place} of its tensor's elements, on {device}, is out of range; what "
        "it takes is NaN"
    ),
}
_NOWHERE = 512  # the address of arrays that no kernel is launched with
_COPIES = "host-to-device"  # the stream of copies that the host waits for


class Card:
    """One physical GPU of this process; logical devices on it share its context and memory.

    The context is made at the first use, so that a process has none on GPUs it does not use.

    Args:
        ordinal: Its number in CUDA.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._process = os.getpid()
        self._opening = threading.Lock()
        self.context: Any = None
        self.memory: Pool = device_pool(self.enter)
        self.pinned = PinnedPool(self.enter)

    @property
    def usable(self) -> bool:
        """Whether this process may call CUDA for it: no child made by fork may."""
        return os.getpid() == self._process

    def enter(self) -> None:
        """Make its context current in this thread.

        Raises:
            UsageError: This process was forked from the one that uses the GPU.
        """
        if not self.usable:
            raise UsageError(
                f"process {os.getpid()} was forked from process {self._process}, which uses GPU "
                f"{self.ordinal}, and CUDA does not work in it; start processes with the method "
                "'spawn' instead"
            )
        if self.context is None:
            with self._opening:
                if self.context is None:
                    self.context = call(api.cuDevicePrimaryCtxRetain, self.ordinal)
        call(api.cuCtxSetCurrent, self.context)

    def free(self) -> str:
        """Describe how much of its memory is free, and how much this process has."""
        self.enter()
        free, total = call(api.cuMemGetInfo)
        mine = self.memory.nbytes
        return f"{free} of its {total} bytes are free, and this process has {mine}"

    @cached_property
    def architecture(self) -> str:
        """Its architecture, as compilers call it: "sm_80"."""
        attribute = api.CUdevice_attribute
        major, minor = (
            call(api.cuDeviceGetAttribute, each, self.ordinal)
            for each in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return f"sm_{major}{minor}"


class CudaDevice(Device):
    """A logical GPU.

    Args:
        name: Its name.
        card: The physical GPU.
    """

    def __init__(self, name: DeviceName, card: Card) -> None:
        super().__init__(name)
        self.card = card
        self.enter = card.enter
        self._flaws: Any = None

    @property
    def usable(self) -> bool:
        """Whether this process may call CUDA for it."""
        return self.card.usable

    @property
    def identity(self) -> str:
        return bytes(call(api.cuDeviceGetUuid_v2, self.card.ordinal).bytes).hex()

    @property
    def partition(self) -> str:
        """Its name if it is a slice of a GPU (MIG), otherwise empty."""
        name = call(api.cuDeviceGetName, 128, self.card.ordinal)
        text = str(name.split(b"\0")[0].decode())
        return text if " MIG " in f" {text} " else ""

    def allocate(self, nbytes: int, contents: Contents = (), *, zero: bool = True) -> Buffer:
        return self._allocate(nbytes, contents, zero, None)

    def allocate_result(self, nbytes: int) -> Buffer:
        return self._allocate(nbytes, (), False, self._last_use)

    def _last_use(self) -> CudaEvent | None:
        """Return the end of CuPy's work, when the program releases an array that it was given."""
        if not self.usable:
            return None
        event = self.event()
        return event if cupy_streams.record(event) else None

    def _allocate(
        self, nbytes: int, contents: Contents, zero: bool, last_use: LastUse | None
    ) -> Buffer:
        nbytes = integer("a Buffer's size in bytes", nbytes, 0)
        taken = self.memory.take(nbytes, contents)
        try:
            block = self.card.memory.block(nbytes, last_use)
        except OutOfMemoryError as error:
            self.memory.give_back(taken)
            raise OutOfMemoryError(
                f"no memory on {self.name} for {nbytes} bytes ({nbytes / 2**30:.1f} GiB): "
                f"{self.card.free()}; use a smaller model or batch, spread the batch over more "
                "GPUs, or end other processes that use this one (nvidia-smi lists them)"
                f"{self.memory.largest(contents)}"
            ) from error
        self.memory.until_gone(taken, block)
        block.device = str(self.name)
        made = Buffer(arrays.flat_view(block.address, nbytes, block, self.card.ordinal), self)
        if zero and nbytes:
            stream = self._stream(None)
            self.enter()
            call(api.cuMemsetD8Async, block.address, 0, nbytes, stream.handle)
            stream.synchronize()
        return made

    def reserve(self, nbytes: int, count: int) -> None:
        pools = (self.card.memory, self.card.pinned)
        taken = [pool.block(nbytes) for pool in pools for _ in range(count)]
        del taken  # all at once: they are idle now

    def adopt(self, array: Any) -> Any:
        return arrays.adopt(array, self.card.ordinal)

    def address(self, flat: Any) -> int:
        return arrays.pointer(flat)

    def took(self, array: Any) -> bool:
        return arrays.taken_by(array) == str(self.name)

    def accepts(self, array: Any) -> bool:
        return self.holds(array) and arrays.contiguous(array) and arrays.aligned(array)

    def holds(self, array: Any) -> bool:
        return isinstance(array, arrays.Array) and arrays.ordinal_of(array) == self.card.ordinal

    def borrows(self, array: Any) -> bool:
        return arrays.borrowed(array) == self.card.ordinal

    def view(self, array: Any, stream: Stream | None = None, *, written: bool = False) -> Any:
        on = self._stream(stream)
        if self.holds(array):  # CuPy's
            cupy_streams.wait_for_cupy(on)
            return array
        self.enter()
        return arrays.view(array, on.address, written=written)

    def copy(self, target: Any, source: Any, stream: Stream | None = None) -> None:
        to = target.bytes if isinstance(target, Buffer) else target
        come = source.bytes if isinstance(source, Buffer) else source
        if to.shape != come.shape or to.dtype != come.dtype:
            raise ShapeError(
                f"a copy needs equal shapes and dtypes, not {come.dtype} {come.shape} "
                f"into {to.dtype} {to.shape}"
            )
        on = self._stream(stream)
        if isinstance(come, np.ndarray):
            self._upload(to, come, on)
        elif isinstance(to, np.ndarray):
            self._download(to, come, on)
        else:
            on.launch(self.assign, to, come)
        if stream is None:
            on.synchronize()

    def _upload(self, to: Any, come: npt.NDArray[Any], on: CudaStream) -> None:
        """Copy from the host: through pinned memory, so that the host may go on and change it."""
        if not come.nbytes:
            return
        staged = self.card.pinned.array(come.shape, come.dtype)
        np.copyto(staged, come)
        self.enter()
        call(
            *(api.cuMemcpyHtoDAsync, arrays.pointer(to), staged.ctypes.data),
            *(come.nbytes, on.handle),
        )
        on.hold(staged)

    def _download(self, to: npt.NDArray[Any], come: Any, on: CudaStream) -> None:
        """Copy to the host; only to pinned memory without waiting."""
        if not come.nbytes:
            return
        if not arrays.contiguous(come):
            whole = self.allocate(come.nbytes, zero=False).array(come.dtype, come.shape)
            on.launch(self.assign, whole, come)
            on.hold(whole)
            come = whole
        self.enter()
        call(
            *(api.cuMemcpyDtoHAsync, to.ctypes.data, arrays.pointer(come), to.nbytes, on.handle),
        )

    def read(self, array: Any, *, ready: bool = False) -> npt.NDArray[Any]:
        if not ready:
            self.synchronize()
        staged = self.host_empty(array.shape, array.dtype)
        self.copy(staged, array)
        return np.array(staged)

    def write(self, target: Any, value: Any) -> None:
        self.synchronize()
        if isinstance(value, np.ndarray | np.generic | int | float | bool):
            if not arrays.contiguous(target):
                raise UsageError("a part of a GPU's array with gaps cannot be set from the host")
            whole = np.ascontiguousarray(np.broadcast_to(value, target.shape), target.dtype)
            self.copy(target, whole.reshape(target.shape))
            return
        self._stream(None).launch(self.assign, target, value)
        self._stream(None).synchronize()

    def assign(self, target: Any, value: Any) -> None:
        copies.assign(target, value)

    def accumulate(self, target: Any, value: Any) -> None:
        elementwise.binary("add")(target, [target, value], {})

    def clip(self, divisor: Any, gradients: Any, count: Any, limit: float) -> None:
        optimizers.clip(divisor, gradients, count, limit)

    def blank(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        return arrays.flat_view(_NOWHERE, nbytes, None, self.card.ordinal).view(kind).reshape(shape)

    def zeros_like(self, array: Any) -> Any:
        """Return an array of zeros with the shape and strides of one that may have no memory."""
        first, nbytes = arrays.extent(array)
        there = self.allocate(nbytes).bytes
        return arrays.like(array, there, arrays.pointer(array) - first)

    def constant(self, value: npt.NDArray[Any]) -> Any:
        return self.number(value, None)

    def number(self, value: npt.NDArray[Any], stream: Stream | None) -> Any:
        there = self.allocate(value.nbytes, zero=False).array(value.dtype, value.shape)
        self.copy(there, value, stream)
        return there

    def host_empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return self.card.pinned.array(shape, dtype)

    def keep(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.array(array)  # pinned memory is scarce, and wanted for the next copies

    def flaw(self, kind: str) -> int:
        """Return the address where kernels note the place of a wrong input, counted from 1.

        Args:
            kind: A key of `_FLAWS`.
        """
        if self._flaws is None:
            self._flaws = self.allocate(4 * len(_FLAWS)).array(np.int32, (len(_FLAWS),))
        return arrays.pointer(self._flaws) + 4 * list(_FLAWS).index(kind)

    def check(self) -> None:
        """Raise an error if a kernel has met a wrong label or index.

        Raises:
            UsageError: It has; names the place.
        """
        if self._flaws is None:
            return
        on = self._stream(None)
        staged = self.host_empty((len(_FLAWS),), np.int32)
        self.copy(staged, self._flaws)
        if not staged.any():
            return
        self.enter()
        call(api.cuMemsetD8Async, arrays.pointer(self._flaws), 0, staged.nbytes, on.handle)
        on.synchronize()
        found = {kind: int(place) for kind, place in zip(_FLAWS, staged, strict=True) if place}
        kind, place = next(iter(found.items()))
        raise UsageError(_FLAWS[kind].format(place=place - 1, device=self.name.local))

    def order_caller(self, event: Event) -> None:
        cupy_streams.wait_in_cupy(event)

    def scratch(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return memory for a kernel's use on the current stream."""
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        return current_stream().scratch(nbytes).view(kind).reshape(shape)

    def stream(self, name: str) -> CudaStream:
        return CudaStream(self, name)

    def _stream(self, stream: Stream | None) -> CudaStream:
        found = self.own(_COPIES) if stream is None else stream
        assert isinstance(found, CudaStream)
        return found

    def event(self) -> CudaEvent:
        return CudaEvent(self)
