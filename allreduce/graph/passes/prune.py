"""Remove nodes that nothing needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from allreduce.graph.core.node import Graph, Rewriter
from allreduce.graph.passes.validate import check_fed


def prune(graph: Graph, feeds: Collection[int] = ()) -> Graph:
    """Keep the ancestors of fetches and effects; ancestors of a fed value are not needed.

    Args:
        feeds: Nodes that become inputs, after the graph's own.

    Raises:
        UsageError: A kept node needs a placeholder that is neither an input nor a feed.
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
