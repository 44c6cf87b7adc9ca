"""Make one operation of a chain of element-wise ones, that goes through memory once."""

from __future__ import annotations

from dataclasses import dataclass, field

from allreduce.graph.fusion import Chain, Link
from allreduce.graph.node import Graph, Node, Rewriter
from allreduce.graph.ops.base import lookup


def fuse(graph: Graph) -> Graph:
    """Join element-wise operations to the only one that reads them, on the same device.

    What is joined has the shape of the chain's value, so that nothing is computed twice; its other
    inputs broadcast to it.
    """
    heads = _heads(graph)
    members: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.id in heads:
            members.setdefault(heads[node.id], []).append(node)
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        chain = members.get(node.id)
        if chain is not None:
            _add(rewriter, chain)
        elif node.id not in heads:
            rewriter.keep(node)
    return rewriter.finish()


def _heads(graph: Graph) -> dict[int, int]:
    """Find for each member of a chain the one that gives the chain's value."""
    consumers = graph.consumers()
    kept = {*graph.outputs, *graph.effects, *(i for node in graph.nodes for i in node.control)}
    heads: dict[int, int] = {}
    for node in reversed(graph.nodes):
        if not lookup(node.op).elementwise or node.control:
            continue
        readers = consumers[node.id]
        if len(readers) == 1 and node.id not in kept and readers[0] in heads:
            reader = graph.nodes[readers[0]]
            if reader.spec.shape == node.spec.shape and reader.device == node.device:
                heads[node.id] = heads[reader.id]
                continue
        heads[node.id] = node.id
    joined = set(heads.values()) - {head for member, head in heads.items() if member != head}
    return {member: head for member, head in heads.items() if head not in joined}


@dataclass(slots=True)
class _Builder:
    """Collects a chain's links, and what they read from outside."""

    inputs: list[int] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # of members, among the links

    def add(self, node: Node) -> None:
        reads = []
        for i in node.inputs:
            if i in self.places:
                reads.append(-1 - self.places[i])
            else:
                if i not in self.inputs:
                    self.inputs.append(i)
                reads.append(self.inputs.index(i))
        self.places[node.id] = len(self.links)
        self.links.append(Link(node.op, node.attrs, tuple(reads), node.spec.dtype))


def _add(rewriter: Rewriter, members: list[Node]) -> None:
    builder = _Builder()
    for node in members:
        builder.add(node)
    inputs = tuple(rewriter.moved[i] for i in builder.inputs)
    attrs = {"chain": Chain.of(builder.links)}
    last = members[-1]
    rewriter.moved[last.id] = rewriter.add(last, op="fused", inputs=inputs, attrs=attrs, control=())
