"""What a step returns: large values are written where the caller keeps them, others are copied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping
from math import prod
from typing import Any

import numpy as np

from allreduce.devices import Buffer, Device, DeviceName, Event
from allreduce.devices.base import ALIGNMENT
from allreduce.graph.core.host_future import Fetched, Output
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.execute.memory import said
from allreduce.graph.schedule.program import Program

# Bytes. To lend memory takes 6 µs; a copy of half as many bytes takes 2.4, and one of these 70, as
# its memory comes from the system each time.
LEAST_LENT = 1 << 17


class Outputs:
    """A program's outputs, of which those that it computes are written to memory of their own.

    The caller gets that memory, and a later step has it again once nothing refers to it any more:
    whoever keeps a value, or a view of it, has it as it was. What is copied from a device to the
    host lies there in memory that is lent until the copy is done.

    Args:
        program: What returns them.
        elsewhere: Nodes whose values have another place.
        shape: Gives the shape of a node's value.
        device: Gives the device that a program calls by a name.
        lends: Whether it does so; else all outputs of CPUs are copied.

    Attributes:
        lent: Nodes whose values are written to such memory.
        nbytes: What one copy of each takes.
        passing: Those, what looks at them, and what was fed: the memory is no more theirs when a
            step is over.
    """

    def __init__(
        self,
        program: Program,
        elsewhere: Container[int],
        shape: Callable[[Node], tuple[int, ...]],
        device: Callable[[DeviceName], Device],
        lends: bool = True,
    ) -> None:
        self._shape = shape
        self._rooms: dict[int, Room] = {}
        self._outputs: list[tuple[Node, bool]] = []  # and whether its memory is given away
        self._lent: dict[int, Lent] = {}  # of devices
        self._copied: dict[int, Lent] = {}  # the same, by who copies it
        self._fetched: dict[int, Fetched] = {}
        sources = _sources(program)
        for node in [each.node for each in program.instructions if each.node.op == "fetch"]:
            made = sources[node.inputs[0]]
            if made.id not in self._lent:
                self._lent[made.id] = Lent(made, shape(made), device)
            self._copied[node.id] = self._lent[made.id]
        for node in program.outputs:
            source = sources.get(node.id)
            gives = (
                lends
                and source is not None
                and source.device is not None
                and source.device.on_host
                and source.id not in elsewhere
                and source.id not in self._rooms  # what is returned twice is two values
                and prod(shape(node)) == prod(shape(source))  # the memory holds nothing else
                and prod(shape(source)) * source.spec.dtype.itemsize >= LEAST_LENT
            )
            if source is not None and gives:
                self._rooms[source.id] = Room.of(source, shape(source), device)
            self._outputs.append((node, gives))
        self.nbytes = sum(room.nbytes for room in self._rooms.values())
        self.nbytes += sum(lent.nbytes for lent in self._lent.values())
        self.lent = [*self._rooms, *self._lent]
        self.passing = [i for i, source in sources.items() if source.id in self.lent]
        self.passing += [
            each.node.id for each in program.instructions if each.node.op in ("feed", "fetch")
        ]

    def lend(self) -> dict[int, np.ndarray]:
        """Return where a step's values go, by node; whoever drops the arrays gives them back."""
        found = {node: room.lend() for node, room in self._rooms.items()}
        if self._lent:
            found.update({node: lent.lend() for node, lent in self._lent.items()})
        return found

    def fetch(self, node: Node, array: np.ndarray, copied: Event) -> None:
        """Note that a copy to the host is under way.

        Args:
            node: What copies.
            array: Where it goes.
            copied: When it is there.
        """
        self._copied[node.id].read_until(copied)
        self._fetched[node.id] = Fetched(array, copied)

    def of(self, values: Mapping[int, np.ndarray]) -> list[Output]:
        """Return the outputs of a step that has ended, each in memory that nothing else uses."""
        return [self._output(node, gives, values) for node, gives in self._outputs]

    def _output(self, node: Node, gives: bool, values: Mapping[int, np.ndarray]) -> Output:
        if node.id in self._fetched:
            return self._fetched.pop(node.id)
        if node.id not in values:  # left out of the null program: there are no rows of it
            return np.zeros(self._shape(node), node.spec.dtype)
        value = values[node.id]
        return value if gives and value.flags.c_contiguous else value.copy()


def _sources(program: Program) -> dict[int, Node]:
    """Find what computes each value: of a view, what it looks at; of others, themselves."""
    found: dict[int, Node] = {}
    for instruction in program.instructions:
        node, op = instruction.node, lookup(instruction.node.op)
        if op.view is not None:
            if node.inputs[0] in found:
                found[node.id] = found[node.inputs[0]]
        elif op.kind == "compute":
            found[node.id] = node
    return found


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


class Room:
    """Memory for one value, lent to one holder at a time; there is more of it if he keeps it.

    One piece that nobody has is kept. Fresh pages would take longer than most steps: to copy 40 MB
    to them takes 12 ms, and to memory that was in use before 5.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self.nbytes = prod(shape) * dtype.itemsize
        self._pieces: list[np.ndarray] = []  # lent last: all arrays over one of them refer to it

    @classmethod
    def of(cls, node: Node, shape: tuple[int, ...], device: Callable[[DeviceName], Device]) -> Room:
        """Make room for a node's value; its device counts the memory of one."""
        assert node.device is not None, node
        room = cls(shape, node.spec.dtype)
        budget = device(node.device).memory
        budget.until_gone(budget.take(room.nbytes, [(room.nbytes, said(node, shape))]), room)
        return room

    def lend(self) -> np.ndarray:
        """Return memory that nobody else has, until the last array over it is gone.

        Nothing of ours is run when that happens: a signal's handler might, and what it raises
        where an object ends is lost.
        """
        size, pieces = self.nbytes, self._pieces
        idle = [i for i in range(len(pieces)) if _references(pieces, i) == _OURS]
        piece = pieces[idle[0]] if idle else np.empty(size + ALIGNMENT, np.uint8)
        # What a step is fed is often what the one before has returned: two take turns then.
        kept = [pieces[i] for i in range(len(pieces)) if i not in idle]
        self._pieces = [*kept[-1:], piece]
        skip = -piece.__array_interface__["data"][0] % ALIGNMENT
        return piece[skip : skip + size].view(self._dtype).reshape(self._shape)


def _references(pieces: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(pieces[index])


# Of a piece that only a list has; how Python counts its own depends on its version.
_OURS = _references([np.empty(0, np.uint8)], 0)
