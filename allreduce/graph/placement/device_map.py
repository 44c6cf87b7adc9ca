"""The devices of one replica, by the names that its program calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from allreduce.devices.names import DeviceName


@dataclass(frozen=True, slots=True)
class Places:
    """What the device names in a replica's program mean.

    All replicas run one program. An index in it counts the replica's own devices, so that `CPU:1`
    is each replica's second CPU. Kinds of which replicas own none, as the CPUs beside GPUs, are
    everyone's, and called what they are.

    Attributes:
        home: What the program calls the replica's first device.
        names: Each device that the replica may use, by the name that its program calls it.
    """

    home: DeviceName
    names: Mapping[DeviceName, DeviceName]

    @classmethod
    def of(cls, own: Sequence[DeviceName], all_devices: Sequence[DeviceName]) -> Places:
        """Number a replica's own devices.

        Args:
            own: In full, the first one first.
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
