"""Facts derived from a program alone, computed once for all batch sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from allreduce.devices import COLLECTIVE
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.schedule.plan_buffers import plan_buffers
from allreduce.graph.schedule.program import Instruction, Program
from allreduce.graph.schedule.schedule import schedule
from allreduce.graph.trace.subgraph import Body

# Operations without a kernel that any thread may run.
_FREE = ("read", "scan", "scan_result")


class ProgramFacts:
    """A program and the facts derived from it.

    Attributes:
        nodes: The nodes of the program's instructions, by id.
        stored: For gradients computed directly in an arena, by id: the `store_gradient` node.
        free: For each instruction, whether any thread may run it. Only the replica's own thread
            waits for collectives.
        awaited: For each instruction, the collectives to wait for before it.
        beside_host: Whether the program has asynchronous device streams.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        instructions = program.instructions
        self.nodes: dict[int, Node] = {each.node.id: each.node for each in instructions}
        self.stored = stored_in_place(program)
        self.free = [
            _is_free(each.node) and not self.collectives(each.node.before) for each in instructions
        ]
        self.awaited = [self._awaited(each) for each in instructions]
        self.beside_host = any(
            not each.stream.device.on_host and each.stream.kind != COLLECTIVE
            for each in instructions
        )
        self._bodies: dict[int, ProgramFacts] = {}

    def collectives(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Return which of these nodes are collectives of the program."""
        found = (self.nodes.get(i) for i in nodes)
        return tuple(each.id for each in found if each and lookup(each.op).kind == "collective")

    def _awaited(self, instruction: Instruction) -> tuple[int, ...]:
        if instruction.stream.kind == COLLECTIVE:  # their own order is kept anyway
            return ()
        instructions = self.program.instructions
        return self.collectives(instructions[i].node.id for i in instruction.waits)

    @cached_property
    def fed(self) -> dict[int, Node]:
        """The `feed` of each input that is read on a device, by the input's id."""
        nodes = [each.node for each in self.program.instructions]
        return {node.inputs[0]: node for node in nodes if node.op == "feed"}

    @cached_property
    def host_inputs(self) -> frozenset[int]:
        """The program's inputs that are read in the host's memory."""
        read = (
            i
            for each in self.program.instructions
            if each.node.op != "feed" and each.stream.device.on_host
            for i in each.node.inputs
        )
        return frozenset(read) & frozenset(self.program.inputs)

    @cached_property
    def after(self) -> tuple[frozenset[int], ...]:
        """For each instruction, the indices of the instructions that must end before it."""
        return _dependencies(self.program)

    def of_body(self, scan: Node) -> ProgramFacts:
        """Return the facts of the program that a scan repeats."""
        if scan.id not in self._bodies:
            body: Body = scan.attrs["body"]
            program = schedule(body.graph)
            if self.program.blocks is not None:  # the pass is on
                program = plan_buffers(program)
            self._bodies[scan.id] = ProgramFacts(program)
        return self._bodies[scan.id]


def stored_in_place(program: Program) -> dict[int, Node]:
    """Find gradients that can be computed in the arena; maps them to their `store_gradient`."""
    uses = Counter(i for each in program.instructions for i in each.node.inputs)
    uses.update(node.id for node in program.outputs)
    made = {each.node.id: each.node for each in program.instructions}
    found: dict[int, Node] = {}
    for instruction in program.instructions:
        node = instruction.node
        if node.op != "store_gradient" or "adds" in node.attrs:
            continue
        if uses[node.inputs[0]] == 1 and node.inputs[0] in made:
            op = lookup(made[node.inputs[0]].op)
            if op.kind == "compute" and op.view is None:
                found[node.inputs[0]] = node
    return found


def _is_free(node: Node) -> bool:
    """Return whether any thread may run an instruction: it has no effect but its value."""
    op = lookup(node.op)
    return node.op in _FREE or op.cpu is not None or op.view is not None


def _dependencies(program: Program) -> tuple[frozenset[int], ...]:
    """Return for each instruction the indices of the instructions that must end before it.

    These are the instructions of its inputs and control inputs. Instructions with effects also
    depend on the previous one with effects, so that collectives start in one order on all ranks.
    Assumes that no values share memory.
    """
    place = {each.node.id: index for index, each in enumerate(program.instructions)}
    found: list[frozenset[int]] = []
    ordered = -1
    for index, instruction in enumerate(program.instructions):
        before = {place[i] for i in instruction.node.before if i in place}
        if not _is_free(instruction.node):
            before.add(ordered)
            ordered = index
        found.append(frozenset(before - {-1}))
    return tuple(found)
