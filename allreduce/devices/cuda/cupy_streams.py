"""CuPy's current stream: the only use of CuPy's own CUDA runtime, which needs a real driver.

`make test` does not run `_address` itself: the tests put another function in its place.
"""

from __future__ import annotations

from typing import Any

import cupy

from allreduce.devices.cuda.driver import api, call


def _address() -> int | None:
    """Return the address of this thread's current stream; None if CuPy's runtime cannot run."""
    try:
        return int(cupy.cuda.get_current_stream().ptr)
    except cupy.cuda.runtime.CUDARuntimeError:  # then CuPy has enqueued nothing
        return None


def wait_for_cupy(stream: Any) -> None:
    """Have a stream wait for what CuPy's current stream has been given on its device.

    Args:
        stream: A CudaStream.
    """
    event = stream.device.event()
    if record(event):
        stream.wait(event)


def record(event: Any) -> bool:
    """Set a CudaEvent to the end of CuPy's current stream; returns False without one."""
    address = _address()
    if address is None:
        return False
    event.device.enter()
    call(api.cuEventRecord, event.handle, address)
    return True
