"""Fuse chains of element-wise operations."""

from __future__ import annotations

from collections.abc import Sequence

from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup
from allreduce.graph.ops.fusion import Chain, Link


def fuse(graph: Graph) -> Graph:
    """Fuse element-wise operations into their only reader on the same device.

    Fused operations have native kernels and the shape of the chain's value, so nothing is computed
    twice; other inputs broadcast to it.
    """
    heads = _heads(graph)
    chains: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.id in heads:
            chains.setdefault(heads[node.id], []).append(node)
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if heads.get(node.id, node.id) != node.id:  # computed inside another one, or with it
            continue
        members = chains.get(node.id, [node])
        inputs = _outside(members)
        chain = _chain(graph, members, inputs) if len(members) > 1 else None
        if chain is None:
            for each in members:
                rewriter.keep(each)
            continue
        moved = tuple(rewriter.moved[i] for i in inputs)
        attrs = {"chain": chain}
        rewriter.moved[node.id] = rewriter.add(
            node, op="fused", inputs=moved, attrs=attrs, control=()
        )
    return rewriter.finish()


def _heads(graph: Graph) -> dict[int, int]:
    """Find for each element-wise operation the one that gives its chain's value."""
    nodes = graph.nodes
    kept = {*graph.outputs, *graph.effects, *(i for node in nodes for i in node.control)}
    # The only reader of each value that has just one.
    only = {i: lists[0] for i, lists in enumerate(graph.consumers()) if len(lists) == 1}
    heads: dict[int, int] = {}
    for node in reversed(nodes):
        if not lookup(node.op).elementwise or node.control or not _is_fusible(graph, node):
            continue
        reader = -1 if node.id in kept else only.get(node.id, -1)
        alike = reader in heads and _alike(node, nodes[reader])
        heads[node.id] = heads[reader] if alike else node.id
    return heads


def _is_fusible(graph: Graph, node: Node) -> bool:
    """Return whether native code and a node's kind of device run its operation in a chain."""
    if node.device is not None and not lookup("fused").runs_on(node.device.kind):
        return False
    return _chain(graph, [node], node.inputs) is not None


def _alike(node: Node, reader: Node) -> bool:
    return node.spec.shape == reader.spec.shape and node.device == reader.device


def _outside(members: Sequence[Node]) -> list[int]:
    """List the outer inputs of a chain."""
    inside = {node.id for node in members}
    return list(dict.fromkeys(i for node in members for i in node.inputs if i not in inside))


def _chain(graph: Graph, members: Sequence[Node], inputs: Sequence[int]) -> Chain | None:
    """Describe a chain that gets these inputs; None if it has too many."""
    places = {node.id: -1 - at for at, node in enumerate(members)}
    places.update((i, at) for at, i in enumerate(inputs))
    return Chain.of(
        [Link(node.op, tuple(places[i] for i in node.inputs), node.spec.dtype) for node in members],
        [graph.nodes[i].spec.dtype for i in inputs],
    )
