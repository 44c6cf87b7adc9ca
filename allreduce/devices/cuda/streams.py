"""CUDA streams and events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from allreduce.devices.base import COLLECTIVE, Event, Stream
from allreduce.devices.cuda import cupy_streams
from allreduce.devices.cuda.driver import NOT_READY, CudaError, api, call, failure
from allreduce.errors import InternalError

# Collectives first: whatever else runs, other ranks wait for them.
_URGENT = (COLLECTIVE,)
_SCRATCH_STEP = 512  # bytes: aligned as CUDA's memory is


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
        self._scratch = Scratch(device)
        self._launching = threading.RLock()  # one launch's kernels share the scratch memory
        self.blas: Any = None  # blas.py's handle for it

    def launch(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call `work` now; what it launches goes to this stream."""
        self.device.enter()
        with self._launching, self._scratch.frame() as outgrown:
            before, _here.stream = _here.stream, self
            try:
                work(*arguments)
            finally:
                _here.stream = before
                if outgrown:
                    self.hold(*outgrown)

    def launch_custom(self, work: Callable[..., object], *arguments: Any) -> None:
        self.device.enter()
        with cupy_streams.current(self):
            self.launch(work, *arguments)

    def rehearse(self, work: Callable[..., object], *arguments: Any) -> bool:
        """Load the kernels and take the memory that `work` will need; change no array."""
        before, _here.rehearsal = _here.rehearsal, Rehearsal()
        try:
            self.launch(work, *arguments)
            return _here.rehearsal.is_complete
        finally:
            _here.rehearsal = before

    def rehearse_custom(
        self,
        kernel: Callable[..., object],
        out: Any,
        inputs: Sequence[Any],
        attrs: Mapping[str, Any],
    ) -> bool:
        """Call a user's kernel on zeros; an error that is not the GPU's may be due to these."""
        try:
            first, *others = [self.device.zeros_like(each) for each in (out, *inputs)]
            self.launch_custom(kernel, first, others, attrs)
            self.synchronize()
        except CudaError:  # no later call works
            raise
        except Exception:  # the step raises it again, if it has another cause
            return False
        return True

    def scratch(self, nbytes: int) -> Any:
        """Return memory for the running launch as a flat array of bytes."""
        return self._scratch.take(nbytes)

    def record(self, event: Event) -> None:
        self.device.enter()
        call(api.cuEventRecord, _own(event).handle, self.handle)

    def wait(self, event: Event) -> None:
        self.device.enter()
        call(api.cuStreamWaitEvent, self.handle, _own(event).handle, 0)

    def synchronize(self) -> None:
        self.device.enter()
        call(api.cuStreamSynchronize, self.handle)


class Scratch:
    """Memory for kernels' intermediate results, which the launches of one stream share.

    Launches of a stream run in order, so that each may overwrite what earlier ones have used. It
    grows to what the largest launch needs, which a rehearsal finds before the first step.

    Args:
        device: Allocates it.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._buffer: Any = None
        self._used = 0  # bytes, by the launches that are under way
        self._outgrown: list[Any] = []

    @contextmanager
    def frame(self) -> Iterator[list[Any]]:
        """Give back at the end of a with block what it took; yields what the block outgrew."""
        used, outgrown, self._outgrown = self._used, self._outgrown, []
        try:
            yield self._outgrown
        finally:
            self._used, self._outgrown = used, outgrown

    def take(self, nbytes: int) -> Any:
        size = -(-nbytes // _SCRATCH_STEP) * _SCRATCH_STEP
        if self._buffer is None or self._used + size > self._buffer.nbytes:
            if self._buffer is not None:
                self._outgrown.append(self._buffer)
            contents = [(self._used + size, "intermediate results of kernels")]
            self._buffer = self._device.allocate(self._used + size, contents, zero=False)
        found = self._buffer.bytes[self._used : self._used + nbytes]
        self._used += size
        return found


class Rehearsal:
    """One `CudaStream.rehearse`.

    Attributes:
        is_complete: Whether the step will find everything loaded.
    """

    is_complete = True


class _Here(threading.local):
    stream: CudaStream | None = None
    rehearsal: Rehearsal | None = None


_here = _Here()


def current_stream() -> CudaStream:
    """Return the stream that the running `CudaStream.launch` enqueues on."""
    assert _here.stream is not None, "kernels are called by a stream's launch"
    return _here.stream


def rehearsal() -> Rehearsal | None:
    """Return the rehearsal that is under way: kernels are only loaded, and nothing is launched."""
    return _here.rehearsal


def _own(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise InternalError(f"a CUDA stream has no use for a {type(event).__name__}")
    return event
