"""The null program: the step of a replica without samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.schedule.dependence import dependents, of_samples
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.schedule import bind

_STORES = ("store_gradient", "store_count")


def null_program(program: Program) -> Program:
    """Remove instructions that need samples; keep the step's collectives and updates.

    A bucket's gradients and count are cleared instead of stored. Collective sums and the like get
    their neutral element, since this replica has no weight. Rows that do not depend on samples are
    gathered from this replica too. Memory is not planned.
    """
    nodes = [*program.given.values(), *(each.node for each in program.instructions)]
    dependent = dependents(nodes, of_samples)
    kept: dict[int, Node] = {}
    cleared: dict[int, int] = {}  # of each plan: the node that clears its gradients
    stands: dict[int, tuple[int, ...]] = {}  # for nodes that are left out: the nodes to wait for
    for instruction in program.instructions:
        node = instruction.node
        if node.op == "clear_gradients":  # before the first of several micro-batches
            cleared[id(node.attrs["plan"])] = node.id
        if node.op in _STORES:
            first = cleared.setdefault(id(node.attrs["plan"]), node.id)
            if first != node.id:
                stands[node.id] = (first,)
                continue
            node = replace(node, op="clear_gradients", inputs=())
        elif node.id in dependent:
            # A node that changes its inputs does not wait for them to be computed, either.
            waited = node.control if lookup(node.op).kind == "compute" else node.before
            stands[node.id] = _kept(waited, stands)
            continue
        elif node.op == "all_reduce" or not dependent.isdisjoint(node.inputs):
            node = replace(node, inputs=(), attrs={**node.attrs, "absent": True})
        kept[node.id] = replace(node, control=_kept(node.control, stands))
    instructions = bind(_needed(program, kept).values(), program.given)
    return replace(program, instructions=instructions, blocks=None)


def _needed(program: Program, kept: dict[int, Node]) -> dict[int, Node]:
    """Remove compute instructions whose values nothing reads."""
    read = {node.id for node in program.outputs}
    needed: dict[int, Node] = {}
    for node in reversed(kept.values()):
        if lookup(node.op).kind != "compute" or node.id in read:
            needed[node.id] = node
            read.update(node.before)
    return dict(reversed(needed.items()))


def _kept(nodes: Iterable[int], stands: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Replace removed dependencies by their own dependencies."""
    return tuple(dict.fromkeys(i for node in nodes for i in stands.get(node, (node,))))
