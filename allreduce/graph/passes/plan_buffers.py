"""Plan which values share memory: how long each is in use, and which take over another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from allreduce.graph.node import Node
from allreduce.graph.ops.base import lookup
from allreduce.graph.program import Block, Program


def plan_buffers(program: Program) -> Program:
    """Give every value that an instruction makes a place in a block of memory.

    A block is in use from the instruction that writes its first value to the last one that reads
    its last; blocks whose times do not overlap may lie in the same memory. A value takes over the
    block of an input that nothing needs afterwards, where its kernel can work in place.
    """
    uses = _Uses.of(program)
    places: dict[int, int] = {}
    blocks: list[Block] = []
    for index, instruction in enumerate(program.instructions):
        node = instruction.node
        if not _makes(node):
            continue
        last = uses.last.get(node.id, uses.ends[index])
        taken = uses.taken_over(node, index)
        if taken is None:
            places[node.id] = len(blocks)
            assert node.device is not None, node
            blocks.append(Block((node.id,), index, last, node.device))
        else:
            place = places[node.id] = places[taken]
            old = blocks[place]
            blocks[place] = replace(old, values=(*old.values, node.id), last=last)
    return replace(program, blocks=tuple(blocks))


def _makes(node: Node) -> bool:
    """Say whether an instruction needs room for its value."""
    op = lookup(node.op)
    computed = op.kind == "compute" and op.view is None
    return computed or node.op == "receive" or (op.kind == "collective" and bool(node.inputs))


@dataclass(slots=True)
class _Uses:
    """When values are read for the last time.

    Attributes:
        ends: For each instruction the one at which it has surely ended: a collective is under way
            until another instruction waits for it, or to the end of the step.
        nodes: What makes each value.
        bases: For each value in a block the value that the block was made for: a view's is what it
            looks at.
        last: For each such value the last instruction that reads it, or a view of it.
    """

    ends: list[int]
    nodes: dict[int, Node] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> _Uses:
        """Read a program through once."""
        found = cls(_ends(program))
        received = _receptions(program)
        for index, instruction in enumerate(program.instructions):
            node = instruction.node
            found.nodes[node.id] = node
            end = found.ends[index]
            if node.op == "send":
                end = received(node)
            for i in node.inputs:
                if i in found.bases:
                    base = found.bases[i]
                    found.last[base] = max(found.last[base], end)
            if _makes(node):
                found.bases[node.id] = node.id
                found.last[node.id] = end
            elif lookup(node.op).view is not None and node.inputs[0] in found.bases:
                found.bases[node.id] = found.bases[node.inputs[0]]
        for node in program.outputs:
            if node.id in found.bases:
                found.last[found.bases[node.id]] = len(program.instructions)
        return found

    def taken_over(self, node: Node, index: int) -> int | None:
        """Find an input that a node can write its value over."""
        for place, i in enumerate(node.inputs):
            same = [j for j in node.inputs if self.bases.get(j, -1) == i]
            if (
                self.bases.get(i) == i
                and self.last[i] == index
                and all(j == i for j in same)  # no view of it, whose elements lie elsewhere
                and self.nodes[i].spec == node.spec
                and self.nodes[i].device == node.device
                and _in_place(node, place)
            ):
                return i
        return None


def _ends(program: Program) -> list[int]:
    count = len(program.instructions)
    pending = [each.stream == "collective" for each in program.instructions]
    ends = [count if waits else index for index, waits in enumerate(pending)]
    for index, instruction in enumerate(program.instructions):
        for i in instruction.waits:
            if pending[i]:
                ends[i] = min(ends[i], index)
    return ends


def _receptions(program: Program) -> Callable[[Node], int]:
    """Tell when what a node sends has been received: another program's receive is not known of."""
    found = {
        (each.node.attrs["edge"], each.node.attrs["destination"]): index
        for index, each in enumerate(program.instructions)
        if each.node.op == "receive"
    }
    end = len(program.instructions)
    return lambda node: found.get((node.attrs["edge"], node.attrs["destination"]), end)


def _in_place(node: Node, place: int) -> bool:
    """Say whether a node's kernel may write where one of its inputs lies."""
    if node.op == "fused":  # only its last operation writes there, a block at a time
        last = node.attrs["chain"].links[-1]
        return place not in last.reads or lookup(last.op).in_place
    return lookup(node.op).in_place
