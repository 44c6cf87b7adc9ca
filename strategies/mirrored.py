"""MirroredStrategy: a replica on every device of this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from allreduce.strategies.base import Strategy

from allreduce.comm import world
from allreduce.devices import DeviceName, logical_devices, lookup
from allreduce.devices.integers import integer
from allreduce.errors import UsageError


class MirroredStrategy(Strategy):
    """Replicates over devices of one process; gradients are all-reduced between them.

    Args:
        devices: Device names, in full or in part; by default all GPUs, or else all logical CPUs
            (one unless `ar.config.set_logical_devices("CPU", n)` came first).
        devices_per_replica: Of how many of them, one after the other, a replica is made: its step
            can place layers on each (`ar.device("CPU:1")` is then every replica's second one).

    Raises:
        UsageError: The process is one of several ranks, a device is named twice, or the devices
            cannot be dealt out evenly.
        DeviceError: A device does not exist here.
    """

    def __init__(
        self, devices: Sequence[str | DeviceName] | None = None, *, devices_per_replica: int = 1
    ) -> None:
        here = world()
        if here.size > 1:
            raise UsageError(
                f"rank {here.rank}: MirroredStrategy replicates inside one process, but this job "
                f"has {here.size} ranks ({here.source}); use ar.MultiWorkerMirroredStrategy()"
            )
        owned = deal_out(local_devices(devices), devices_per_replica)
        super().__init__(owned, 0, len(owned))


def local_devices(devices: Sequence[str | DeviceName] | None = None) -> list[DeviceName]:
    """Complete device names, or list the default devices of a process's replicas.

    Raises:
        UsageError: No device is left, or one is named twice.
    """
    if devices is None:
        gpus = [device for device in logical_devices() if device.kind == "GPU"]
        return [device.name for device in gpus or logical_devices("CPU")]
    if isinstance(devices, str | DeviceName) or not isinstance(devices, Iterable):
        raise UsageError(f'devices is a list of names, such as ["CPU:0"], not {devices!r}')
    chosen = [lookup(name).name for name in devices]
    if not chosen or len(set(chosen)) < len(chosen):
        listed = ", ".join(map(str, chosen)) or "none"
        raise UsageError(f"each replica needs its own device; got {listed}")
    return chosen


def deal_out(devices: Sequence[DeviceName], each: int) -> list[Sequence[DeviceName]]:
    """Assign each replica its number of devices.

    Raises:
        UsageError: Some would be left over.
    """
    each = integer("devices_per_replica", each, 1)
    if len(devices) % each:
        raise UsageError(
            f"{len(devices)} devices ({', '.join(map(str, devices))}) cannot be dealt out to "
            f"replicas of {each}; ar.config.set_logical_devices makes more of them"
        )
    return [devices[at : at + each] for at in range(0, len(devices), each)]
