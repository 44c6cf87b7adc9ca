"""Copies from and to the host, for devices whose memory it cannot read."""

from __future__ import annotations

from dataclasses import replace

from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup


def copy_with_host(graph: Graph) -> Graph:
    """Bring what a placed graph is fed to such devices, and what it returns from them.

    A graph on CPUs stays as it is. What a batch was brought to its device ahead of the step is only
    passed on (`allreduce.data.staging`): so a step shows what it reads, and where it came from,
    whoever has done it.
    """
    if not any(_is_far(node) for node in graph.nodes):
        return graph
    rewriter = Rewriter(graph)
    fed: dict[int, int] = {}  # of each input: the new one
    for node in graph.nodes:
        fed[node.id] = rewriter.keep(node)
        if node.op == "placeholder" and _is_far(node):
            made = rewriter.add(node, op="feed", inputs=(fed[node.id],), attrs={}, control=())
            rewriter.moved[node.id] = made
    outputs = [_fetched(rewriter, graph.nodes[i]) for i in graph.outputs]
    inputs = tuple(fed[i] for i in graph.inputs)
    return replace(rewriter.finish(), inputs=inputs, outputs=tuple(outputs))


def _fetched(rewriter: Rewriter, node: Node) -> int:
    """Return what a step returns in place of a value: one in the host's memory."""
    value = rewriter.moved[node.id]
    if not _is_far(node):
        return value
    if not _is_computed(node, rewriter.old):  # its memory changes in the next step
        value = rewriter.add(node, op="snapshot", inputs=(value,), attrs={}, control=())
    return rewriter.add(node, op="fetch", inputs=(value,), attrs={}, control=())


def _is_computed(node: Node, graph: Graph) -> bool:
    """Say whether a kernel writes a value, wherever it is told to, or what it looks at."""
    while lookup(node.op).view is not None:
        node = graph.nodes[node.inputs[0]]
    return lookup(node.op).kind == "compute"


def _is_far(node: Node) -> bool:
    return node.device is not None and not node.device.on_host
