"""The kinds of devices, one row each; a kind's module is imported when it is first needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

from allreduce.devices.base import Runtime

RUNTIMES: dict[str, str] = {
    "CPU": "allreduce.devices.cpu:CpuRuntime",
    "GPU": "allreduce.devices.cuda.runtime:CudaRuntime",
}


def runtime(kind: str) -> Runtime:
    """Return the runtime of one kind in `RUNTIMES`."""
    return made(RUNTIMES[kind])


@cache
def made(row: str) -> Runtime:
    """Make a row's runtime, once."""
    module, _, name = row.partition(":")
    found = getattr(importlib.import_module(module), name)()
    assert isinstance(found, Runtime)
    return found


def kernel(kind: str | None, operator: str) -> Callable[..., object] | None:
    """Return the kernel that a kind of device has for one of the library's operators."""
    return runtime(kind).kernel(operator) if kind in RUNTIMES else None


def absence(kind: str | None) -> str:
    """Return why there is no device of a kind in `RUNTIMES`; empty if that is not so."""
    return runtime(kind).absence() if kind in RUNTIMES else ""
