"""Have all ranks start their collectives in one order."""

from __future__ import annotations

from allreduce.graph.core.node import Graph, Rewriter
from allreduce.graph.core.op_table import lookup


def order_collectives(graph: Graph) -> Graph:
    """Order each collective after the one recorded before it, and buckets by index.

    Readiness alone could differ between ranks, for example if a value is constant on one rank only,
    or with a pass switched off.
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
