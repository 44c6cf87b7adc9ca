"""Remove nodes that nothing needs."""

from __future__ import annotations

from allreduce.graph.core.node import Graph, Rewriter


def prune(graph: Graph) -> Graph:
    """Keep the ancestors of fetches and effects, and the inputs."""
    needed: set[int] = {*graph.outputs, *graph.effects}
    for node in reversed(graph.nodes):
        if node.id in needed:
            needed.update(node.before)
    # A step keeps the inputs it was called with, whether it reads them or not.
    needed.update(graph.inputs)
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.id in needed:
            rewriter.keep(node)
    return rewriter.finish()
