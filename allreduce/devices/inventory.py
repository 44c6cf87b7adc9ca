"""Which devices this process has: the physical ones it finds, the logical ones it makes of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from allreduce.devices.base import Device
from allreduce.devices.integers import integer
from allreduce.devices.names import LOCAL_CPU, DeviceName
from allreduce.devices.registry import RUNTIMES, runtime, unused_gpus
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
        self._logical: tuple[Device, ...] | None = None

    def physical(self, kind: str | None = None) -> list[PhysicalDevice]:
        """List the physical devices, of one kind or of all; no GPUs, as nothing can use them."""
        kinds = list(RUNTIMES) if kind is None else _listed(kind)
        return [
            PhysicalDevice(f"/physical_device:{each}:{index}", each)
            for each in kinds
            for index in range(runtime(each).count())
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
        wanted = RUNTIMES if kind is None else _listed(kind)
        with self._lock:
            if self._logical is None:
                self._logical = tuple(self._make())
            return [device for device in self._logical if device.kind in wanted]

    def _make(self) -> list[Device]:
        if ignored := unused_gpus():
            have = counted(ignored, "GPU")
            logger.info("this machine has %s, but this version has no runtime for GPUs", have)
        devices = []
        for kind in RUNTIMES:
            physical = runtime(kind).count()
            for index in range(self._wanted.get(kind, physical)):
                name = DeviceName(kind=kind, index=index).complete()
                devices.append(runtime(kind).open(name, index % physical))
                devices[-1].memory.limit = self._limits.get(kind)
        return devices

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


def _listed(kind: str) -> list[str]:
    """Give the kind that is to be listed; none for GPUs, as programs ask whether there are any."""
    return [] if lacks_runtime(str(kind).upper()) else [_known(kind)]


def _known(kind: str) -> str:
    """Give the kind's name as the registry has it, or say why there is none."""
    if str(kind).upper() in RUNTIMES:
        return str(kind).upper()
    if why := lacks_runtime(str(kind).upper()):
        raise DeviceError(why)
    near = did_you_mean(kind, RUNTIMES)
    raise DeviceError(f"unknown kind of device {kind!r}: there are {', '.join(RUNTIMES)}{near}")


def _reason(name: DeviceName, devices: list[Device]) -> str:
    """Explain why a complete name fits none of the devices, and name the remedy."""
    places = [device.name.local for device in devices]
    there_are = f"there are {', '.join(places)}"
    if (name.job, name.replica, name.task) != (LOCAL_CPU.job, LOCAL_CPU.replica, LOCAL_CPU.task):
        here = f"/job:{LOCAL_CPU.job}/replica:{LOCAL_CPU.replica}/task:{LOCAL_CPU.task}"
        return f"only devices of this process, {here}, can be used; {there_are}"
    if why := lacks_runtime(name.kind):
        return f"{why}; {there_are}"
    hint = did_you_mean(name.local, places)
    if name.kind in RUNTIMES:
        more = f'ar.config.set_logical_devices("{name.kind}", n) before their first use makes more'
        hint = f"{hint} ({more})"
    return there_are + hint


def lacks_runtime(kind: str | None) -> str:
    """Say why there is no device of a kind that other versions have; empty if that is not why."""
    if kind != "GPU" or "GPU" in RUNTIMES:
        return ""
    ignored = unused_gpus()
    here = f" ({ignored} in this machine)" if ignored else ""
    return f"this version has no runtime for GPUs{here}"
