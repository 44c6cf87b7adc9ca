"""Map the device names of a replica's program to devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from allreduce.devices.names import DeviceName


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The meaning of device names in a replica's program.

    All replicas run one program. An index in it counts the replica's own devices: `CPU:1` is each
    replica's second CPU. Devices of a kind that replicas don't own, such as CPUs if replicas own
    GPUs, are shared and keep their names.

    Attributes:
        home: The name of the replica's first device in the program.
        names: The devices that the replica may use, by their names in the program.
    """

    home: DeviceName
    names: Mapping[DeviceName, DeviceName]

    @classmethod
    def of(cls, own: Sequence[DeviceName], all_devices: Sequence[DeviceName]) -> DeviceMap:
        """Number a replica's own devices.

        Args:
            own: Their full names, the first device first.
            all_devices: All devices of the process.
        """
        counted: Counter[str | None] = Counter()
        names: dict[DeviceName, DeviceName] = {}
        for device in own:
            names[replace(device, index=counted[device.kind])] = device
            counted[device.kind] += 1
        home = next(iter(names))
        names.update({device: device for device in all_devices if device.kind not in counted})
        return cls(home, names)
