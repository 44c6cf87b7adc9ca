"""What all frames of a program have in common: found once, whatever the batch size."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.schedule.footprint import stored_in_place
from allreduce.graph.schedule.parallel import dependencies, is_free
from allreduce.graph.schedule.plan_buffers import plan_buffers
from allreduce.graph.schedule.program import Instruction, Program
from allreduce.graph.schedule.schedule import schedule
from allreduce.graph.schedule.streams import COLLECTIVE
from allreduce.graph.trace.subgraph import Body


class ProgramFacts:
    """A program, and what follows from it alone.

    Attributes:
        nodes: Those of its instructions, by id.
        stored: Gradients that are computed where they are reduced, by node: what would store each.
        free: For each instruction whether any thread may run it: one alone waits for collectives.
        awaited: For each instruction the collectives that end before it.
        beside_host: Whether it has streams of devices that work beside the host.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        instructions = program.instructions
        self.nodes: dict[int, Node] = {each.node.id: each.node for each in instructions}
        self.stored = stored_in_place(program)
        self.free = [
            is_free(each.node) and not self.collectives(each.node.before) for each in instructions
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
    def after(self) -> tuple[frozenset[int], ...]:
        """For each instruction those that have to be over before it."""
        return dependencies(self.program)

    def of_body(self, scan: Node) -> ProgramFacts:
        """Return the facts of the program that a scan repeats."""
        if scan.id not in self._bodies:
            body: Body = scan.attrs["body"]
            program = schedule(body.graph)
            if self.program.blocks is not None:  # the pass is on
                program = plan_buffers(program)
            self._bodies[scan.id] = ProgramFacts(program)
        return self._bodies[scan.id]
