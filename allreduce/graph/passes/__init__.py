"""Passes: each a pure function from a Graph to a Graph, in its own file.

Most are optional: pass_switches.py lists these and turns them on and off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allreduce.graph.core.node import Graph
from allreduce.graph.core.pass_switches import is_on
from allreduce.graph.passes.bucket import bucket
from allreduce.graph.passes.copy_reshapes import copy_reshapes
from allreduce.graph.passes.fold import fold
from allreduce.graph.passes.fuse import fuse
from allreduce.graph.passes.narrow import narrow
from allreduce.graph.passes.order_collectives import order_collectives
from allreduce.graph.passes.order_reads import order_reads
from allreduce.graph.passes.prune import prune
from allreduce.graph.passes.scan_bodies import inside
from allreduce.graph.passes.simplify import simplify

# In the order in which they run. Unused nodes are pruned, also after another pass.
_REWRITES: Mapping[str, Callable[[Graph], Graph]] = {
    "prune": prune,
    "fold": fold,
    "simplify": simplify,
    "narrow": narrow,
    "fuse": fuse,
}


def optimize(graph: Graph) -> Graph:
    """Run the optional passes that are on."""
    for name, run in _REWRITES.items():
        if is_on(name):
            graph = run(graph)
            if name != "prune" and is_on("prune"):
                graph = prune(graph)
    return inside(graph, optimize)


__all__ = [
    "bucket",
    "copy_reshapes",
    "optimize",
    "order_collectives",
    "order_reads",
    "prune",
]
