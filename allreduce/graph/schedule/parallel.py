"""Which instructions of a program may run at once: `set_inter_op_parallelism_threads`."""

from __future__ import annotations

from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.schedule.program import Program

_FREE = ("read", "scan", "scan_result")  # besides what computes a value, or looks at one


def is_free(node: Node) -> bool:
    """Say whether any thread may run an instruction: it changes nothing but its value."""
    op = lookup(node.op)
    return node.op in _FREE or op.cpu is not None or op.view is not None


def dependencies(program: Program) -> tuple[frozenset[int], ...]:
    """Find for each instruction those that have to be over before it.

    These are the nodes before it, and, where it does more than compute a value, all before it that
    do: collectives start in one order on all ranks. No values may share memory.

    Returns:
        Their indices, by instruction.
    """
    place = {each.node.id: index for index, each in enumerate(program.instructions)}
    found: list[frozenset[int]] = []
    ordered = -1
    for index, instruction in enumerate(program.instructions):
        before = {place[i] for i in instruction.node.before if i in place}
        if not is_free(instruction.node):
            before.add(ordered)
            ordered = index
        found.append(frozenset(before - {-1}))
    return tuple(found)
