"""Find the GPUs of this machine. Imports no CUDA package, and makes no context."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from allreduce.devices.base import Device, Runtime
from allreduce.devices.cuda.table import KERNELS, UPDATES
from allreduce.devices.names import DeviceName
from allreduce.errors import DeviceError, UnsupportedError, reworded
from allreduce.events import logger

if TYPE_CHECKING:
    from allreduce.devices.cuda.device import Card

_PACKAGES = ("cuda.bindings", "cuda.core", "cupy")
_INSTALL = "pip install 'allreduce[cuda12]' (or [cuda13])"
# The driver's own list, which is there without any library.
_LISTED = "/proc/driver/nvidia/gpus"
_KERNELS = "allreduce.devices.cuda.kernels"


class CudaRuntime(Runtime):
    """The GPUs that CUDA shows to this process."""

    kind = "GPU"

    @cached_property
    def _found(self) -> tuple[int, str]:
        """The number of GPUs, and why there are none."""
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return 0, "no NVIDIA driver is installed (libcuda.so.1 was not found)"
        missing = [name for name in _PACKAGES if not _is_installed(name)]
        if missing:
            listed = len(os.listdir(_LISTED)) if os.path.isdir(_LISTED) else 0
            there = f", though the driver lists {listed}" if listed else ""
            why = f"the packages {', '.join(missing)} are missing{there}: {_INSTALL}"
            if listed:
                logger.info("GPUs are not used: %s", why)
            return 0, why
        return self._count()

    def _count(self) -> tuple[int, str]:
        api = importlib.import_module("cuda.bindings.driver")
        (status,) = api.cuInit(0)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        if old := _older_driver(api):
            return 0, old
        if status:
            return 0, f"the driver shows no GPU{hidden}: cuInit gave {status.name}"
        _, count = api.cuDeviceGetCount()
        return count, "" if count else f"the driver shows no GPU{hidden}"

    def count(self) -> int:
        return self._found[0]

    def absence(self) -> str:
        return self._found[1]

    def identities(self) -> tuple[str, ...]:
        if not self.count():
            return ()
        api = importlib.import_module("cuda.bindings.driver")
        return tuple(
            bytes(api.cuDeviceGetUuid_v2(ordinal)[1].bytes).hex() for ordinal in range(self.count())
        )

    @cache  # noqa: B019  # there is one runtime in a process
    def _card(self, ordinal: int) -> Card:
        from allreduce.devices.cuda.device import Card

        return Card(ordinal)

    def open(self, name: DeviceName, physical: int) -> Device:
        from allreduce.devices.cuda.device import CudaDevice

        if not self.count():
            raise DeviceError(f"there is no GPU: {self.absence()}")
        return CudaDevice(name, self._card(physical))

    def kernel(self, operator: str) -> Callable[..., object] | None:
        return _kernel(operator) if operator in KERNELS else None

    def update(self, rule: Any, kind: type) -> Callable[..., None] | None:
        name = _updater(kind)
        if name not in UPDATES:
            return None
        module = _module("optimizers")
        found: Callable[..., None] = getattr(module, UPDATES[name])(rule)
        if rule.average_slots:
            found = module.averaged(found, rule)
        return found


def _older_driver(api: Any) -> str:
    """Say that the driver is older than the libraries; empty if it is not.

    Within one major version older drivers work. Source: CUDA Compatibility, minor versions.
    """
    _, version = api.cuDriverGetVersion()
    needed = importlib.import_module("cuda.bindings").__version__
    if version // 1000 >= int(needed.split(".")[0]):
        return ""
    return (
        f"the NVIDIA driver is too old: it supports CUDA {version // 1000}.{version % 1000 // 10}, "
        f"and the installed libraries are for {needed}; update the driver, or install the extra "
        f"for its version (cuda12, cuda13)"
    )


def _updater(kind: type) -> str:
    """Name the class that an optimizer's `update` or kernel comes from: a subclass may differ."""
    own = ("update", "kernel")
    return next(each for each in kind.__mro__ if any(name in vars(each) for name in own)).__name__


@cache
def _kernel(operator: str) -> Callable[..., object]:
    """Return an operator's kernel, which loads its module when it is first called."""

    def run(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        try:
            _loaded(operator)(out, inputs, attrs)
        except UnsupportedError as error:  # of the kernels, which many operators share
            raise reworded(error, f"operator {operator!r}: {error}") from None

    return run


@cache
def _loaded(operator: str) -> Callable[..., object]:
    module, function = KERNELS[operator]
    found: Callable[..., object] = getattr(_module(module), function)(operator)
    return found


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{_KERNELS}.{name}")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
