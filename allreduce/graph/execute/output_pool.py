"""A device's memory for what a step returns, while copies of it to the host are under way."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from allreduce.devices import Buffer, Device, DeviceName, Event
from allreduce.graph.core.node import Node
from allreduce.graph.execute.memory import said


class Lent:
    """A device's memory for a value that is copied to the host, lent to one step at a time.

    A later step has it again when that copy is done, and other memory until then, so that it does
    not wait for the copy. As much stays as was ever under way at once.

    Args:
        node: Whose value lies there.
        shape: The value's.
        device: Gives the device that a program calls by a name.
    """

    def __init__(
        self, node: Node, shape: tuple[int, ...], device: Callable[[DeviceName], Device]
    ) -> None:
        assert node.device is not None, node
        self._device = device(node.device)
        self._shape, self._dtype = shape, node.spec.dtype
        self.nbytes = prod(shape) * node.spec.dtype.itemsize
        self._said = said(node, shape)
        self._pieces: list[tuple[Buffer, list[Event]]] = []  # and its copies; lent last is the last

    def lend(self) -> Any:
        """Return memory that no copy reads."""
        for index, (_, copies) in enumerate(self._pieces):
            if all(event.done() for event in copies):
                buffer, _ = self._pieces.pop(index)
                break
        else:
            buffer = self._device.allocate(self.nbytes, [(self.nbytes, self._said)])
        self._pieces.append((buffer, []))
        return buffer.array(self._dtype, self._shape)

    def read_until(self, event: Event) -> None:
        """Say when a copy of what was lent last is done."""
        self._pieces[-1][1].append(event)
