"""Fuse chains of element-wise operations."""

from __future__ import annotations

from collections.abc import Sequence

from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup
from allreduce.graph.ops.fusion import Chain, Link


def fuse(graph: Graph) -> Graph:
    """Fuse element-wise operations into their only reader on the same device.

    Fused operations have the shape of the chain's value, so nothing is computed twice; other inputs
    broadcast to it.
    """
    heads = _heads(graph)
    chains: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.id in heads:
            chains.setdefault(heads[node.id], []).append(node)
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if heads.get(node.id, node.id) != node.id:  # computed inside another one
            continue
        members = chains.get(node.id, [])
        if len(members) < 2:
            rewriter.keep(node)
            continue
        inputs = _outside(members)
        rewriter.moved[node.id] = rewriter.add(
            node,
            op="fused",
            inputs=tuple(rewriter.moved[i] for i in inputs),
            attrs={"chain": _chain(graph, members, inputs)},
            control=(),
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
        if not lookup(node.op).elementwise or node.control or not _is_fusible(node):
            continue
        reader = -1 if node.id in kept else only.get(node.id, -1)
        alike = reader in heads and _alike(node, nodes[reader])
        heads[node.id] = heads[reader] if alike else node.id
    return heads


def _is_fusible(node: Node) -> bool:
    """Return whether a node's kind of device runs fused operations."""
    return node.device is None or lookup("fused").runs_on(node.device.kind)


def _alike(node: Node, reader: Node) -> bool:
    return node.spec.shape == reader.spec.shape and node.device == reader.device


def _outside(members: Sequence[Node]) -> list[int]:
    """List the outer inputs of a chain."""
    inside = {node.id for node in members}
    return list(dict.fromkeys(i for node in members for i in node.inputs if i not in inside))


def _chain(graph: Graph, members: Sequence[Node], inputs: Sequence[int]) -> Chain:
    """Describe a chain that gets these inputs."""
    places = {node.id: -1 - at for at, node in enumerate(members)}
    places.update((i, at) for at, i in enumerate(inputs))
    return Chain.of(
        [
            Link(node.op, node.attrs, tuple(places[i] for i in node.inputs), node.spec.dtype)
            for node in members
        ],
        [graph.nodes[i].spec.dtype for i in inputs],
    )
