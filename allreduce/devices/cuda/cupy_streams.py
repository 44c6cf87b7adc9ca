"""CuPy's current stream: the only use of CuPy's own CUDA runtime, which needs a real driver.

`make test` does not run `_address` and `_stream` themselves: the tests put other functions in
their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import cupy

from allreduce.devices.cuda.driver import api, call


def _address() -> int | None:
    """Return the address of this thread's current stream; None if CuPy's runtime cannot run."""
    try:
        return int(cupy.cuda.get_current_stream().ptr)
    except cupy.cuda.runtime.CUDARuntimeError:  # then CuPy has enqueued nothing
        return None


def _stream(address: int) -> Any:
    """Return one of our streams as CuPy's; a with block makes it this thread's current one."""
    return cupy.cuda.ExternalStream(address)


@contextmanager
def current(stream: Any) -> Iterator[None]:
    """Have CuPy enqueue on a stream in a with block, on the device whose context is current.

    Args:
        stream: A CudaStream.
    """
    with ExitStack() as entered:
        with suppress(cupy.cuda.runtime.CUDARuntimeError):  # then CuPy has no kernels either
            entered.enter_context(_stream(stream.address))
        yield


def wait_for_cupy(stream: Any) -> None:
    """Have a stream wait for what CuPy's current stream has been given on its device.

    Args:
        stream: A CudaStream.
    """
    event = stream.device.event()
    if record(event):
        stream.wait(event)


def wait_in_cupy(event: Any) -> None:
    """Have CuPy's current stream of a CudaEvent's device wait for it."""
    event.device.enter()
    address = _address()
    if address is not None:
        event.block(address)


def record(event: Any) -> bool:
    """Set a CudaEvent to the end of CuPy's current stream; returns False without one."""
    address = _address()
    if address is None:
        return False
    event.device.enter()
    call(api.cuEventRecord, event.handle, address)
    return True
