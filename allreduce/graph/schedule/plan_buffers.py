"""Plan which values share memory, from how long each is in use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.schedule.clocks import Clock, clocks
from allreduce.graph.schedule.program import Block, Program
from allreduce.graph.schedule.streams import StreamName


def plan_buffers(program: Program) -> Program:
    """Assign every computed value to a block of memory.

    A block is in use from the instruction that writes its first value until no stream can use its
    last value any more; blocks with disjoint times may overlap in memory. If its kernel works in
    place, a value takes over the block of an input that nothing needs afterwards.
    """
    uses = _Uses.of(program)
    places: dict[int, int] = {}
    blocks: list[Block] = []
    for index, instruction in enumerate(program.instructions):
        node = instruction.node
        if not _makes(node):
            continue
        taken = uses.taken_over(node, index)
        if taken is None:
            places[node.id] = len(blocks)
            assert node.device is not None, node
            blocks.append(Block((node.id,), index, uses.last_use(node), node.device))
        else:
            place = places[node.id] = places[taken]
            old = blocks[place]
            blocks[place] = replace(old, values=(*old.values, node.id), last=uses.last_use(node))
    return replace(program, blocks=tuple(blocks))


def _makes(node: Node) -> bool:
    """Return whether an instruction needs memory for its value."""
    op = lookup(node.op)
    computed = op.kind == "compute" and op.view is None
    return computed or node.op == "receive" or (op.kind == "collective" and bool(node.inputs))


@dataclass(slots=True)
class _Uses:
    """The last uses of values.

    Attributes:
        times: The clock of each instruction.
        nodes: The node that computes each value.
        bases: For each value in a block, the value that the block was made for; for a view, its
            base.
        streams: For each such value, the stream that computes it.
        last: For each such value, the last instruction on each stream that uses it or its views.
        writers: For each device and stream, the instructions that write a value to a block.
    """

    times: list[Clock]
    nodes: dict[int, Node] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)
    streams: dict[int, StreamName] = field(default_factory=dict)
    last: dict[int, dict[StreamName, int]] = field(default_factory=dict)
    writers: dict[DeviceName, dict[StreamName, list[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> _Uses:
        """Collect the uses of all values of a program."""
        found = cls(clocks(program.instructions))
        received = _receptions(program)
        for index, instruction in enumerate(program.instructions):
            node, stream = instruction.node, instruction.stream
            found.nodes[node.id] = node
            for i in node.inputs:
                found._use(i, stream, index)
                if node.op == "send":
                    found._use(i, *received(node, stream))
            if _makes(node):
                assert node.device is not None, node
                found.bases[node.id] = node.id
                found.streams[node.id] = stream
                found._use(node.id, stream, index)
                found.writers.setdefault(node.device, {}).setdefault(stream, []).append(index)
            elif lookup(node.op).view is not None and node.inputs[0] in found.bases:
                found.bases[node.id] = found.bases[node.inputs[0]]
        for node in program.outputs:
            if node.id in found.bases:
                found._use(node.id, found.streams[found.bases[node.id]], len(program.instructions))
        return found

    def _use(self, value: int, stream: StreamName, index: int) -> None:
        if value in self.bases:
            last = self.last.setdefault(self.bases[value], {})
            last[stream] = max(last.get(stream, -1), index)

    def last_use(self, node: Node) -> int:
        """Find the last instruction that must not overwrite a value."""
        assert node.device is not None, node
        last = self.last[node.id]
        latest = max(last.values())
        for own, writers in self.writers[node.device].items():
            known = [
                self._unaware(writers, stream, use) for stream, use in last.items() if stream != own
            ]
            if known and max(known) > 0:
                latest = max(latest, writers[max(known) - 1])
        return latest

    def _unaware(self, writers: list[int], stream: StreamName, use: int) -> int:
        """Count a stream's instructions that may run before another stream's one has ended."""
        # Clocks only go forward along a stream.
        return bisect_left(writers, use, key=lambda i: self.times[i][stream])

    def taken_over(self, node: Node, index: int) -> int | None:
        """Find an input whose memory a node can reuse for its output."""
        for place, i in enumerate(node.inputs):
            same = [j for j in node.inputs if self.bases.get(j, -1) == i]
            if (
                self.bases.get(i) == i
                and all(self._is_over(use, stream, index) for stream, use in self.last[i].items())
                and all(j == i for j in same)  # no view of it, whose elements lie elsewhere
                and self.nodes[i].spec == node.spec
                and self.nodes[i].device == node.device
                and _in_place(node, place)
            ):
                return i
        return None

    def _is_over(self, use: int, stream: StreamName, index: int) -> bool:
        """Return whether no other instruction still uses a value when this one runs."""
        return use == index or self.times[index][stream] >= use


def _receptions(program: Program) -> Callable[[Node, StreamName], tuple[StreamName, int]]:
    """Find where and when each sent value is received, if this program receives it."""
    found = {
        (each.node.attrs["edge"], each.node.attrs["destination"]): (each.stream, index)
        for index, each in enumerate(program.instructions)
        if each.node.op == "receive"
    }
    end = len(program.instructions)
    return lambda node, stream: found.get(
        (node.attrs["edge"], node.attrs["destination"]), (stream, end)
    )


def _in_place(node: Node, place: int) -> bool:
    """Return whether a kernel may write its output to the memory of an input."""
    if node.op == "fused":  # only its last operation writes there, a block at a time
        last = node.attrs["chain"].links[-1]
        return place not in last.reads or lookup(last.op).in_place
    return lookup(node.op).in_place
