"""What a value depends on: this step's samples, or which replica computes it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.spec import own_axes
from allreduce.graph.trace.subgraph import with_bodies


def of_samples(node: Node) -> bool:
    """Tell whether a node's value exists only where there are samples; all have everybody's."""
    if node.op == "receive":  # the sender may be another task's
        return bool(node.attrs["of_samples"])
    if node.op == "runtime":
        return node.attrs["name"] in ("rows", "row_offset")
    return any(own_axes(each.spec.shape) for each in with_bodies([node]))


def of_replica(node: Node) -> bool:
    """Tell whether a node's value differs from replica to replica."""
    if node.op == "runtime" and node.attrs["name"] == "replica":
        return True
    return of_samples(node) or (node.op == "placeholder" and node.attrs["varies"])


def depends(node: Node, found: Container[int], root: Callable[[Node], bool]) -> bool:
    """Tell whether a node is a root or reads what was found; all share a collective's result."""
    reads = any(i in found for i in node.inputs)
    return (root(node) or reads) and lookup(node.op).kind != "collective"


def dependents(nodes: Iterable[Node], root: Callable[[Node], bool]) -> set[int]:
    """Find the roots and what is computed from them; a collective's result is the same on all.

    Args:
        nodes: In topological order.
        root: Which nodes the others are followed from.
    """
    found: set[int] = set()
    for node in nodes:
        if depends(node, found, root):
            found.add(node.id)
    return found
