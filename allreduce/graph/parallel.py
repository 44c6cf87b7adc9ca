"""Which instructions of a program may run at once: `set_inter_op_parallelism_threads`."""

from __future__ import annotations

from collections.abc import Callable

from allreduce.graph.node import Node
from allreduce.graph.ops.base import lookup
from allreduce.graph.passes.plan_buffers import Uses
from allreduce.graph.program import Program

Extent = tuple[int, int, int]  # a pool of memory, and the bytes [start, stop) of it


_FREE = ("read", "scan", "scan_result")  # besides what computes a value, or looks at one


def is_free(node: Node) -> bool:
    """Say whether any thread may run an instruction: it changes nothing but its value."""
    op = lookup(node.op)
    return node.op in _FREE or op.cpu is not None or op.view is not None


def dependencies(
    program: Program, extent: Callable[[Node], Extent | None]
) -> tuple[frozenset[int], ...]:
    """Find for each instruction those that have to be over before it.

    These are the nodes before it; what has used the memory that it writes; and, where it does more
    than compute a value, all before it that do: collectives start in one order on all ranks.

    Args:
        program: Its instructions are in an order that is right for one thread.
        extent: Where a node's value lies; None if nothing else ever lies there.

    Returns:
        Their indices, by instruction.
    """
    place = {each.node.id: index for index, each in enumerate(program.instructions)}
    reuse = _Reuse(program, extent)
    found: list[frozenset[int]] = []
    ordered = -1
    for index, instruction in enumerate(program.instructions):
        node = instruction.node
        before = {place[i] for i in node.before if i in place}
        before.update(i for i in reuse.users(node) if i < index)
        if not is_free(node):
            before.add(ordered)
            ordered = index
        found.append(frozenset(before - {-1}))
    return tuple(found)


class _Reuse:
    """Who has used memory that an instruction writes."""

    def __init__(self, program: Program, extent: Callable[[Node], Extent | None]) -> None:
        self._uses = Uses.of(program)
        self._extent = extent
        self._taken: dict[int, list[tuple[int, int, int]]] = {}  # of a pool: start, stop, value

    def users(self, node: Node) -> set[int]:
        """Return what uses the values that lay where a node's value goes, which lies there now."""
        where = self._extent(node) if self._uses.bases.get(node.id) == node.id else None
        if where is None:
            return set()
        pool, start, stop = where
        found: set[int] = set()
        left = []
        for low, high, value in self._taken.get(pool, ()):
            if low < stop and start < high:
                found.update(self._uses.all[value])
            if low < start or stop < high:
                left.append((low, high, value))
        self._taken[pool] = [*left, (start, stop, node.id)]
        return found
