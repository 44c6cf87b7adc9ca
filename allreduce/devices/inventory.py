"""Which devices this process has: the physical ones it finds, the logical ones it makes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from allreduce.devices.base import Device
from allreduce.devices.integers import integer
from allreduce.devices.names import LOCAL_CPU, DeviceName
from allreduce.devices.registry import RUNTIMES, absence, runtime
from allreduce.errors import DeviceError, UsageError, did_you_mean
from allreduce.events import counted, logger


@dataclass(frozen=True)
class PhysicalDevice:
    """A device that is there, whether or not it is used."""

    name: str  # "/physical_device:CPU:0"
    kind: str


class Inventory:
    """The devices of one process; logical ones are made at their first use and stay."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wanted: dict[str, int] = {}
        self._limits: dict[str, int | None] = {}  # bytes of each logical device, by kind
        self._shares: dict[str, Sequence[int]] = {}  # of physical devices; by default all
        self._logical: tuple[Device, ...] | None = None
        self._copied = False  # an array to the host, which is logged once

    def physical(self, kind: str | None = None) -> list[PhysicalDevice]:
        """List the physical devices, of one kind or of all."""
        kinds = list(RUNTIMES) if kind is None else [_known(kind)]
        return [
            PhysicalDevice(f"/physical_device:{each}:{index}", each)
            for each in kinds
            for index in range(len(self._share(each)))
        ]

    def set_logical(self, kind: str, count: int, memory_limit: int | None = None) -> None:
        """Have `count` logical devices of one kind, dealt out over its physical ones.

        Args:
            kind: "CPU".
            count: Their number.
            memory_limit: The bytes that each may allocate; None for the machine's memory.

        Raises:
            UsageError: Logical devices are in use already, in another number or with another limit.
        """
        kind = _known(kind)
        count = integer(f"the number of logical {kind} devices", count, 1)
        if why := absence(kind):
            raise DeviceError(f"no logical {kind} devices can be made: {why}")
        if memory_limit is not None:
            memory_limit = integer("memory_limit, a number of bytes,", memory_limit, 1)
        with self._lock:
            if self._logical is not None:
                have = len(self.logical(kind))
                if have == count and memory_limit == self._limits.get(kind):
                    return
                raise UsageError(
                    f"{counted(have, f'logical {kind} device')} in use already; "
                    f"set_logical_devices({kind!r}, {count}) must come before the first strategy, "
                    "variable or device"
                )
            self._wanted[kind], self._limits[kind] = count, memory_limit

    def logical(self, kind: str | None = None) -> list[Device]:
        """List the logical devices, of one kind or of all; their first use makes them."""
        wanted = RUNTIMES if kind is None else [_known(kind)]
        with self._lock:
            if self._logical is None:
                self._logical = tuple(each for kind in RUNTIMES for each in self._of_kind(kind))
            return [device for device in self._logical if device.kind in wanted]

    def _of_kind(self, kind: str) -> list[Device]:
        devices, physical = [], self._share(kind)
        for index in range(self._wanted.get(kind, len(physical))):
            name = DeviceName(kind=kind, index=index).complete()
            devices.append(runtime(kind).open(name, physical[index % len(physical)]))
            devices[-1].memory.limit = self._limits.get(kind)
        return devices

    def _share(self, kind: str) -> Sequence[int]:
        """Return the numbers of the physical devices of a kind that this process uses."""
        return self._shares.get(kind, range(runtime(kind).count()))

    def identities(self, kind: str) -> tuple[str, ...]:
        """Name the physical devices of a kind that can be dealt out to processes."""
        return runtime(kind).identities()

    def take_share(self, kind: str, numbers: Sequence[int]) -> None:
        """Use some of the physical devices of a kind only.

        Raises:
            UsageError: Others of them are in use already.
        """
        with self._lock:
            if self._logical is None or list(numbers) == [*self._share(kind)]:
                self._shares[kind] = tuple(numbers)
                return
            used = [each for each in self._logical if each.kind == kind and each.in_use]
            if used:
                raise UsageError(
                    f"{used[0].name.local} was used before this process joined the job, which "
                    "deals such devices out to ranks; call ar.init() first"
                )
            self._shares[kind] = tuple(numbers)
            others = [each for each in self._logical if each.kind != kind]
            self._logical = (*others, *self._of_kind(kind))

    def owner(self, array: Any) -> Device | None:
        """Return the device whose memory an array lies in; None for the host's."""
        if type(array) is np.ndarray or not (hasattr(array, "dtype") or offers_gpu_memory(array)):
            return None
        with self._lock:
            made = self._logical or ()
        there = [each for each in made if not each.reads_host]
        found = [each for each in there if each.holds(array) or each.borrows(array)]
        return next((each for each in found if each.took(array)), found[0] if found else None)

    def as_array(self, value: Any) -> Any:
        """Return an array of a device as one of its own, and anything else as a NumPy array."""
        if type(value) is np.ndarray:
            return value
        device = self.owner(value)
        return np.asarray(value) if device is None else device.view(value)

    def on_host(self, value: Any, where: Callable[[], str]) -> Any:
        """Return an array of a device as a copy on the host, and anything else as it is.

        Args:
            value: Given to something that runs on the host.
            where: Returns the line in the program, for the log: the first copy is logged.
        """
        device = None if type(value) is np.ndarray else self.owner(value)
        if device is None:
            return value
        self._log_copy(device, where)
        return self.read(device.view(value))

    def _log_copy(self, device: Device, where: Callable[[], str]) -> None:
        if not self._copied:
            self._copied = True
            logger.info(
                "%s: an array on %s is copied to the host, as what takes it runs on a CPU; further "
                "such copies are not logged",
                *(where(), device.name.local),
            )

    def read(self, array: Any) -> npt.NDArray[Any]:
        """Copy an array of any device to new host memory."""
        device = None if type(array) is np.ndarray else self.owner(array)
        if device is None:
            copied: npt.NDArray[Any] = array.copy()
            return copied
        copied = device.read(array)
        device.confirm()
        return copied

    def write(self, target: Any, value: Any) -> None:
        """Set an array of any device from another one, or from a number; complete on return."""
        source = self.owner(value)
        if type(target) is np.ndarray:
            target[...] = value if source is None else source.read(value)
            return
        device = self.owner(target)
        assert device is not None, "a device's array"
        if source is not None and source is not device:
            source.synchronize()  # each device waits for its own streams
        device.write(target, value)

    def matching(self, pattern: str | DeviceName) -> list[Device]:
        """List the logical devices that agree with a name; the empty name agrees with all."""
        name = DeviceName.parse(pattern)
        return [device for device in self.logical() if name.matches(device.name)]

    def lookup(self, name: str | DeviceName) -> Device:
        """Return the device of a name; open fields are filled with this task and `CPU:0`.

        Raises:
            DeviceError: There is no such device here; the message lists the existing ones.
        """
        full = DeviceName.parse(name).complete()
        devices = self.logical()
        for device in devices:
            if device.name == full:
                return device
        raise DeviceError(f"there is no device {str(full)!r} here: {_reason(full, devices)}")


def offers_gpu_memory(array: Any) -> bool:
    """Return whether an object has CUDA's array interface; looks at its class alone."""
    return hasattr(type(array), "__cuda_array_interface__")


def _known(kind: str) -> str:
    """Return the kind's name as the registry has it, or say why there is none."""
    if str(kind).upper() in RUNTIMES:
        return str(kind).upper()
    near = did_you_mean(kind, RUNTIMES)
    raise DeviceError(f"unknown kind of device {kind!r}: there are {', '.join(RUNTIMES)}{near}")


def _reason(name: DeviceName, devices: list[Device]) -> str:
    """Explain why a complete name fits none of the devices, and name the remedy."""
    places = [device.name.local for device in devices]
    there_are = f"there are {', '.join(places)}"
    if (name.job, name.replica, name.task) != (LOCAL_CPU.job, LOCAL_CPU.replica, LOCAL_CPU.task):
        here = f"/job:{LOCAL_CPU.job}/replica:{LOCAL_CPU.replica}/task:{LOCAL_CPU.task}"
        return f"only devices of this process, {here}, can be used; {there_are}"
    if why := absence(name.kind):
        return f"{why}; {there_are}"
    hint = did_you_mean(name.local, places)
    if name.kind in RUNTIMES:
        more = f'ar.config.set_logical_devices("{name.kind}", n) before their first use makes more'
        hint = f"{hint} ({more})"
    return there_are + hint
