"""The kinds of devices, one row each; a kind's module is imported when it is first needed."""

from __future__ import annotations

import importlib
import os
from functools import cache

from allreduce.devices.base import Runtime

RUNTIMES: dict[str, str] = {
    "CPU": "allreduce.devices.cpu:CpuRuntime",
}

# The driver's own list: reading it needs no CUDA library and initialises nothing.
_NVIDIA_GPUS = "/proc/driver/nvidia/gpus"


@cache
def runtime(kind: str) -> Runtime:
    """Give the runtime of one kind in `RUNTIMES`."""
    module, _, name = RUNTIMES[kind].partition(":")
    made = getattr(importlib.import_module(module), name)()
    assert isinstance(made, Runtime)
    return made


def unused_gpus() -> int:
    """Count the NVIDIA GPUs that the driver shows and no runtime here can use."""
    if "GPU" in RUNTIMES:
        return 0
    try:
        return len(os.listdir(_NVIDIA_GPUS))
    except OSError:  # no driver
        return 0
