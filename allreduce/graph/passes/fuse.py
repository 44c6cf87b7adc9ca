"""Fuse chains of element-wise operations, with a product before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup
from allreduce.graph.ops.fused_ends import Epilogue
from allreduce.graph.ops.fusion import Chain, Link


def fuse(graph: Graph) -> Graph:
    """Fuse element-wise operations into their only reader on the same device.

    Fused operations have the shape of the chain's value, so nothing is computed twice; other inputs
    broadcast to it. A product or convolution that only the chain reads is fused in front.
    """
    plan = _Plan(graph)
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.id in plan.products:
            product, chain = graph.nodes[plan.products[node.id]], plan.chains[node.id]
            inputs = [*product.inputs, *(i for i in _outside(chain) if i != product.id)]
            _add(rewriter, node, "fused_product", _epilogue(graph, product, chain), inputs)
        elif node.id in plan.chains and len(plan.chains[node.id]) > 1:
            chain = plan.chains[node.id]
            inputs = _outside(chain)
            _add(rewriter, node, "fused", {"chain": _chain(graph, chain, inputs)}, inputs)
        elif node.id not in plan.joined:
            rewriter.keep(node)
    return rewriter.finish()


@dataclass(slots=True)
class _Plan:
    """The planned fusions.

    Attributes:
        chains: The members of each chain, also of single nodes, by its last node.
        products: For chains after a product: the product.
        joined: The nodes that are computed inside another one.
    """

    graph: Graph
    chains: dict[int, list[Node]] = field(default_factory=dict)
    products: dict[int, int] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        nodes, consumers = self.graph.nodes, self.graph.consumers()
        controls = (i for node in nodes for i in node.control)
        kept = {*self.graph.outputs, *self.graph.effects, *controls}
        # Each value that only one node reads, with this one.
        only = {i: lists[0] for i, lists in enumerate(consumers) if len(lists) == 1}
        only = {i: j for i, j in only.items() if i not in kept and not nodes[i].control}
        heads = self._heads(only)
        for node in nodes:
            if node.id in heads:
                self.chains.setdefault(heads[node.id], []).append(node)
        for value, members in self.chains.items():
            self._find_product(value, members, only)
        self.joined |= {i for i, head in heads.items() if i != head}

    def _heads(self, only: dict[int, int]) -> dict[int, int]:
        """Find for each element-wise operation the one that gives its chain's value."""
        heads: dict[int, int] = {}
        for node in reversed(self.graph.nodes):
            if not lookup(node.op).elementwise or node.control or not _is_fusible(node):
                continue
            reader = only.get(node.id, -1)
            alike = reader in heads and _alike(node, self.graph.nodes[reader])
            heads[node.id] = heads[reader] if alike else node.id
        return heads

    def _find_product(self, value: int, members: list[Node], only: dict[int, int]) -> None:
        head = self.graph.nodes[value]
        inside = {node.id for node in members}
        for i in _outside(members):
            node = self.graph.nodes[i]
            if lookup(node.op).by_rows and only.get(i) in inside and _alike(node, head):
                # Only images, or rows of a matrix, are computed separately from the first input.
                if node.op == "matmul" and node.spec.ndim != 2:
                    continue
                self.products[value] = i
                self.joined.add(i)
                return


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


def _epilogue(graph: Graph, product: Node, members: Sequence[Node]) -> dict[str, Any]:
    rest = [i for i in _outside(members) if i != product.id]
    chain = _chain(graph, members, [product.id, *rest])
    reads = len(product.inputs)
    fused = Epilogue(product.op, product.attrs, reads, product.spec.dtype, chain)
    return {"chain": fused}


def _add(
    rewriter: Rewriter, node: Node, op: str, attrs: dict[str, Any], inputs: Sequence[int]
) -> None:
    moved = tuple(rewriter.moved[i] for i in inputs)
    rewriter.moved[node.id] = rewriter.add(node, op=op, inputs=moved, attrs=attrs, control=())
