"""Let all ranks start their collectives in one order."""

from __future__ import annotations

from allreduce.graph.core.node import Graph, Rewriter
from allreduce.graph.core.op_table import lookup


def order_collectives(graph: Graph) -> Graph:
    """Put each collective behind the one that was recorded before it, buckets in their order.

    By readiness alone it could differ: what a rank computes from constants of its own, or with a
    pass switched off, is ready earlier or later.
    """
    rewriter = Rewriter(graph)
    last: int | None = None
    for node in graph.nodes:
        control = [rewriter.moved[i] for i in node.control]
        collective = lookup(node.op).kind == "collective"
        if collective and last is not None:
            control.append(last)
        new = rewriter.keep(node, control=tuple(dict.fromkeys(control)))
        if collective:
            last = new
    return rewriter.finish()
