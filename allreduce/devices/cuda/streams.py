"""CUDA streams and events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from allreduce.devices.base import COLLECTIVE, Event, Stream
from allreduce.devices.cuda.driver import NOT_READY, api, call, failure
from allreduce.errors import InternalError

# Collectives first: whatever else runs, other ranks wait for them.
_URGENT = (COLLECTIVE,)


class CudaEvent(Event):
    """A CUDA event without timing."""

    def __init__(self, device: Any) -> None:
        self.device = device  # a CudaDevice, whose module imports this one
        device.enter()
        flags = api.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.handle = call(api.cuEventCreate, flags)

    def done(self) -> bool:
        self.device.enter()
        (status,) = api.cuEventQuery(self.handle)
        if status == NOT_READY:
            return False
        if status:
            raise failure("cuEventQuery", status)
        return True

    def synchronize(self) -> None:
        self.device.enter()
        call(api.cuEventSynchronize, self.handle)

    def block(self, address: int) -> None:
        """Have any CUDA stream wait for the event, such as one of CuPy; the host does not."""
        self.device.enter()
        call(api.cuStreamWaitEvent, address, self.handle, 0)

    def __del__(self) -> None:
        # A destroyed event is released by CUDA once it is reached. At exit the driver may be gone.
        handle = getattr(self, "handle", None)
        if handle is not None and api is not None and self.device.usable:
            api.cuEventDestroy(handle)


class CudaStream(Stream):
    """A CUDA stream that does not synchronize with the legacy default stream."""

    device: Any  # a CudaDevice

    def __init__(self, device: Any, name: str) -> None:
        super().__init__(device, name)
        device.enter()
        least, greatest = call(api.cuCtxGetStreamPriorityRange)
        flags = api.CUstream_flags.CU_STREAM_NON_BLOCKING
        priority = greatest if name in _URGENT else least
        self.handle = call(api.cuStreamCreateWithPriority, flags, priority)
        self.address = int(self.handle)
        self.scratch: list[Any] = []  # memory of the running launch, held until it is done
        self.blas: Any = None  # blas.py's handle for it

    def launch(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call `work` now; what it launches goes to this stream."""
        self.device.enter()
        before, _here.stream = _here.stream, self
        try:
            work(*arguments)
        finally:
            _here.stream = before
            if self.scratch:
                self.hold(*self.scratch)
                self.scratch.clear()

    def record(self, event: Event) -> None:
        self.device.enter()
        call(api.cuEventRecord, _own(event).handle, self.handle)

    def wait(self, event: Event) -> None:
        self.device.enter()
        call(api.cuStreamWaitEvent, self.handle, _own(event).handle, 0)

    def synchronize(self) -> None:
        self.device.enter()
        call(api.cuStreamSynchronize, self.handle)


class _Here(threading.local):
    stream: CudaStream | None = None


_here = _Here()


def current_stream() -> CudaStream:
    """Return the stream that the running `CudaStream.launch` enqueues on."""
    assert _here.stream is not None, "kernels are called by a stream's launch"
    return _here.stream


def _own(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise InternalError(f"a CUDA stream has no use for a {type(event).__name__}")
    return event
