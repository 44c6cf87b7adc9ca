"""Find values that depend on this replica's samples, or that differ between replicas."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.spec import own_axes
from allreduce.graph.trace.subgraph import with_bodies


def of_samples(node: Node) -> bool:
    """Return whether a node exists only if there are samples of this replica."""
    if node.op == "receive":  # the sender may be another task's
        return bool(node.attrs["of_samples"])
    if node.op == "runtime":
        return node.attrs["name"] in ("rows", "row_offset")
    return any(own_axes(each.spec.shape) for each in with_bodies([node]))


def of_replica(node: Node) -> bool:
    """Return whether a node is a source of differences between replicas."""
    if node.op == "runtime" and node.attrs["name"] == "replica":
        return True
    return of_samples(node) or (node.op == "placeholder" and node.attrs["varies"])


def depends(node: Node, found: Container[int], root: Callable[[Node], bool]) -> bool:
    """Return whether a node is a root or reads a dependent one; collectives end dependence."""
    reads = any(i in found for i in node.inputs)
    return (root(node) or reads) and lookup(node.op).kind != "collective"


def dependents(nodes: Iterable[Node], root: Callable[[Node], bool]) -> set[int]:
    """Find roots and nodes computed from them; collectives give equal results everywhere."""
    found: set[int] = set()
    for node in nodes:
        if depends(node, found, root):
            found.add(node.id)
    return found
