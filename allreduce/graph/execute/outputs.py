"""Memory for a step's outputs: large ones are computed in the caller's array, others copied.

Large values for another task of this host are computed in memory that both share.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np

from allreduce.devices import Buffer, Device, DeviceName, Event
from allreduce.devices.base import ALIGNMENT
from allreduce.graph.core.host_future import HostFuture, Output
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.execute.memory import describe_value
from allreduce.graph.partition.rendezvous import Rendezvous
from allreduce.graph.schedule.program import Program

# Bytes. Reusing memory takes 6 µs. A copy of half as many bytes takes 2.4 µs; a copy of this many
# takes 70, because its memory comes from the system each time.
LEAST_ZERO_COPY = 1 << 17


class Outputs:
    """A program's outputs; large computed ones are written directly to memory for the caller.

    A later step reuses that memory once nothing refers to it, so a value that the caller keeps, or
    a view of it, never changes. An output on a device stays in reserved memory until its copy to
    the host is done.

    Args:
        elsewhere: Nodes whose values have their memory elsewhere.
        rendezvous: Has the memory for values for other tasks.
        zero_copy: Whether outputs are written to the caller's memory; otherwise they are copied.

    Attributes:
        output_nodes: Nodes whose values are written to memory for the caller or another task.
        nbytes: Bytes of one copy of each.
        replaced: Values in whose memory, instead of new one, an output node is computed in place.
        arriving: Large values of other tasks, which are read where they arrive.
        passing: Nodes whose values must be dropped after a step: both, their views, and inputs.
    """

    def __init__(
        self,
        program: Program,
        elsewhere: Container[int],
        shape: Callable[[Node], tuple[int, ...]],
        device: Callable[[DeviceName], Device],
        rendezvous: Rendezvous,
        zero_copy: bool = True,
    ) -> None:
        self._shape = shape
        self._host: dict[int, HostOutput] = {}
        self.replaced: dict[int, int] = {}  # and the output node
        self._outputs: list[tuple[Node, bool]] = []  # and whether the caller gets its memory
        self._device_outputs: dict[int, DeviceOutput] = {}
        self._copied: dict[int, DeviceOutput] = {}  # the same, by the node that copies it
        self._fetched: dict[int, HostFuture] = {}
        sources = _sources(program)
        for node in [each.node for each in program.instructions if each.node.op == "fetch"]:
            made = sources[node.inputs[0]]
            if made.id not in self._device_outputs:
                self._device_outputs[made.id] = DeviceOutput(made, shape(made), device)
            self._copied[node.id] = self._device_outputs[made.id]
        for node in program.outputs:
            source = sources.get(node.id)
            gives = zero_copy and self._may_move(node, source, elsewhere)
            if source is not None and gives:
                self._host[source.id] = HostOutput.of(source, shape(source), device)
            self._outputs.append((node, gives))
        if zero_copy:
            self._share(program, sources, elsewhere, device, rendezvous)
        self.nbytes = sum(each.nbytes for each in self._host.values())
        self.nbytes += sum(each.nbytes for each in self._device_outputs.values())
        self.output_nodes = [*self._host, *self._device_outputs, *self.replaced]
        self.arriving = {node.id for node in sources.values() if _arrives(node, shape(node))}
        moving = {*self.output_nodes, *self.arriving}
        self.passing = [i for i, source in sources.items() if source.id in moving]
        self.passing += [
            each.node.id for each in program.instructions if each.node.op in ("feed", "fetch")
        ]

    def _may_move(self, node: Node, source: Node | None, elsewhere: Container[int]) -> bool:
        """Return whether the memory of a large value, as `node` returns it, may be chosen here."""
        shape = self._shape
        return (
            source is not None
            and source.device is not None
            and source.device.on_host
            and source.op != "receive"
            and source.id not in elsewhere
            and source.id not in self._host  # returned twice: two arrays
            and prod(shape(node)) == prod(shape(source))  # the memory holds nothing else
            and prod(shape(source)) * source.spec.dtype.itemsize >= LEAST_ZERO_COPY
        )

    def _share(
        self,
        program: Program,
        sources: Mapping[int, Node],
        elsewhere: Container[int],
        device: Callable[[DeviceName], Device],
        rendezvous: Rendezvous,
    ) -> None:
        """Compute values for other tasks in memory that these read, as far as there is any."""
        nodes = {each.node.id: each.node for each in program.instructions}
        found = []
        for node in nodes.values():
            if node.op != "send" or not node.inputs or node.inputs[0] not in nodes:
                continue
            source, destination = sources.get(node.inputs[0]), node.attrs["destination"]
            if source is None or not self._may_move(nodes[node.inputs[0]], source, elsewhere):
                continue
            nbytes = prod(self._shape(source)) * source.spec.dtype.itemsize
            if (memory := rendezvous.reserve(destination, nbytes)) is not None:
                found.append(memory)  # so that it is not found twice
                made = HostOutput.of(source, self._shape(source), device)
                made.reserve = partial(rendezvous.reserve, destination, nbytes)
                self._host[source.id] = made
        for block in program.blocks or ():
            for at, node_id in enumerate(block.values):
                before = block.values[:at]
                if node_id in self._host and all(
                    self._may_move(nodes[i], sources.get(i), elsewhere) for i in before
                ):
                    self.replaced.update(dict.fromkeys(before, node_id))

    def allocate(self) -> dict[int, np.ndarray]:
        """Return an array for each output node; it is reused when nothing refers to it."""
        found: dict[int, Any] = {}
        for node, output in self._host.items():
            found[node] = output.allocate()
        for node, piece in self._device_outputs.items():
            found[node] = piece.allocate()
        for node, output_node in self.replaced.items():
            found[node] = found[output_node]
        return found

    def fetch(self, node: Node, array: np.ndarray, copied: Event) -> None:
        """Record a started copy to the host."""
        output = self._copied[node.id]
        output.read_until(copied)
        self._fetched[node.id] = HostFuture(array, copied, output.device)

    def of(self, values: Mapping[int, np.ndarray]) -> list[Output]:
        """Return the outputs of a step that has ended, each in memory that nothing else uses."""
        found: list[Output] = []
        for node, gives in self._outputs:
            if node.id in self._fetched:
                found.append(self._fetched.pop(node.id))
            elif (value := values.get(node.id)) is None:  # omitted from the null program: no rows
                found.append(np.zeros(self._shape(node), node.spec.dtype))
            else:
                found.append(value if gives and value.flags.c_contiguous else value.copy())
        return found


def _arrives(node: Node, shape: tuple[int, ...]) -> bool:
    """Return whether a value of another task is so large that copying it costs more than it saves.

    Its readers run in Python instead of native replay, as it is elsewhere in each step.
    """
    if node.op != "receive" or not node.attrs["across"]:
        return False
    assert node.device is not None, node
    return node.device.on_host and prod(shape) * node.spec.dtype.itemsize >= LEAST_ZERO_COPY


def _sources(program: Program) -> dict[int, Node]:
    """Map each node to the node that computes or receives its value: for a view, its base."""
    found: dict[int, Node] = {}
    for instruction in program.instructions:
        node, op = instruction.node, lookup(instruction.node.op)
        if op.view is not None:
            if node.inputs[0] in found:
                found[node.id] = found[node.inputs[0]]
        elif op.kind == "compute" or node.op == "receive":
            found[node.id] = node
    return found


class DeviceOutput:
    """Device memory for an output while it is copied to the host.

    Memory is reused when its copy is done; until then, later steps get other memory and need not
    wait. The pool keeps as many pieces as were ever in use at once.
    """

    def __init__(
        self, node: Node, shape: tuple[int, ...], device: Callable[[DeviceName], Device]
    ) -> None:
        assert node.device is not None, node
        self.device = device(node.device)
        self._shape, self._dtype = shape, node.spec.dtype
        self.nbytes = prod(shape) * node.spec.dtype.itemsize
        self._contents = describe_value(node, shape)
        self._pieces: list[tuple[Buffer, list[Event]]] = []  # and its copies; used last comes last

    def allocate(self) -> Any:
        """Return memory that no copy reads."""
        for index, (_, copies) in enumerate(self._pieces):
            if all(event.done() for event in copies):
                buffer, _ = self._pieces.pop(index)
                break
        else:
            buffer = self.device.allocate(self.nbytes, [(self.nbytes, self._contents)])
        self._pieces.append((buffer, []))
        return buffer.array(self._dtype, self._shape)

    def read_until(self, event: Event) -> None:
        """Keep the memory allocated last until a copy of it is done."""
        self._pieces[-1][1].append(event)


class HostOutput:
    """Host memory for one output, reused when nothing refers to it.

    One unused piece is kept, because fresh pages are slow: copying 40 MB to them takes 12 ms, and
    to memory that was in use before 5.

    Attributes:
        reserve: Returns bytes that are shared with another task, which are used instead.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self.reserve: Callable[[], np.ndarray | None] = lambda: None
        self.nbytes = prod(shape) * dtype.itemsize
        self._pieces: list[np.ndarray] = []  # used last comes last; arrays refer to their piece

    @classmethod
    def of(
        cls, node: Node, shape: tuple[int, ...], device: Callable[[DeviceName], Device]
    ) -> HostOutput:
        """Make the pool for a node's value; its device counts the memory of one piece."""
        assert node.device is not None, node
        made = cls(shape, node.spec.dtype)
        budget = device(node.device).memory
        budget.until_gone(
            budget.take(made.nbytes, [(made.nbytes, describe_value(node, shape))]), made
        )
        return made

    def allocate(self) -> np.ndarray:
        """Return an array in memory that nothing else refers to.

        References are counted here rather than tracked by finalizers: a signal's handler could run
        in a finalizer, and its exception would be lost.
        """
        if (shared := self.reserve()) is not None:
            return shared.view(self._dtype).reshape(self._shape)
        size, pieces = self.nbytes, self._pieces
        idle = [i for i in range(len(pieces)) if _references(pieces, i) == _OURS]
        piece = pieces[idle[0]] if idle else np.empty(size + ALIGNMENT, np.uint8)
        # A step is often fed the previous output: keep one used piece, so that two alternate.
        kept = [pieces[i] for i in range(len(pieces)) if i not in idle]
        self._pieces = [*kept[-1:], piece]
        skip = -piece.__array_interface__["data"][0] % ALIGNMENT
        return piece[skip : skip + size].view(self._dtype).reshape(self._shape)


def _references(pieces: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(pieces[index])


# The count of a piece that only a list refers to; it depends on the Python version.
_OURS = _references([np.empty(0, np.uint8)], 0)
