"""Outputs on devices whose memory the host cannot read: asynchronous copies to the host.

The step starts the copies and returns. Reading an output waits for its copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce.devices import Device, Event


class HostFuture:
    """A host array that a device copy fills.

    Attributes:
        owner: What the copy needs until it is done: the replicas, whose communicators end
            collectives that are under way when they are freed.
    """

    __slots__ = ("_array", "_device", "_event", "owner")

    def __init__(self, array: np.ndarray, event: Event, device: Device) -> None:
        self._array = array
        self._event = event
        self._device: Device | None = device
        self.owner: object = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype

    def wait(self) -> np.ndarray:
        """Wait for the copy; returns the array."""
        self._event.synchronize()
        if self._device is not None:
            self._device.confirm()
            self._device.check()
            self._array = self._device.keep(self._array)
            self._device = self.owner = None
        return self._array


# The result of a step: on CPUs an array.
Output = np.ndarray | HostFuture


def arrived(output: Output) -> np.ndarray:
    """Return an output's array, after waiting for its copy."""
    return output.wait() if isinstance(output, HostFuture) else output
