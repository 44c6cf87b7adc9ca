"""Remove what nothing needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from allreduce.graph.core.node import Graph, Rewriter
from allreduce.graph.passes.validate import check_fed


def prune(graph: Graph, feeds: Collection[int] = ()) -> Graph:
    """Keep the ancestors of fetches and effects; an interior value that is fed cuts all above it.

    Args:
        graph: Any graph.
        feeds: Nodes that become inputs, after the graph's own.

    Raises:
        UsageError: What is kept needs a placeholder that is neither an input nor among the feeds.
    """
    needed: set[int] = {*graph.outputs, *graph.effects}
    for node in reversed(graph.nodes):
        if node.id in needed and node.id not in feeds:
            needed.update(node.before)
    # A step keeps the inputs it was called with, whether it reads them or not.
    needed.update(graph.inputs)
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.id not in needed:
            continue
        if node.id in feeds:
            name = f"feed of {node.op}"
            cut = replace(node, op="placeholder", inputs=(), control=(), attrs={"name": name})
            rewriter.keep(cut)
        else:
            rewriter.keep(node)
    pruned = rewriter.finish()
    fed = tuple(rewriter.moved[i] for i in feeds if i not in graph.inputs)
    pruned = replace(pruned, inputs=pruned.inputs + fed)
    check_fed(pruned)
    return pruned
