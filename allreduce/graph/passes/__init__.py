"""Passes: each a pure function from a Graph to a Graph, in a file of its own.

Those in `OPTIONAL` only make a program quicker. Each can be turned off, to find out which one is to
blame for a wrong result; results are the same to rounding without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allreduce.devices import options
from allreduce.errors import UsageError, unknown_name
from allreduce.graph.node import Graph
from allreduce.graph.passes.bucket import bucket
from allreduce.graph.passes.fold import fold
from allreduce.graph.passes.fuse import fuse
from allreduce.graph.passes.order_reads import order_reads
from allreduce.graph.passes.prune import prune
from allreduce.graph.passes.simplify import simplify

# In the order in which they run. Pruned is what nothing needs, also after another pass.
OPTIONAL: Mapping[str, Callable[[Graph], Graph]] = {
    "prune": prune,
    "fold": fold,
    "simplify": simplify,
    "fuse": fuse,
}

_off: frozenset[str] = frozenset()


def optimize(graph: Graph) -> Graph:
    """Run the optional passes that are on."""
    # A chain would hide which of its operations made a NaN.
    off = _off | {"fuse"} if options.current().check_numerics else _off
    for name, run in OPTIONAL.items():
        if name not in off:
            graph = run(graph)
            if name != "prune" and "prune" not in off:
                graph = prune(graph)
    return graph


def switch(name: str, on: bool) -> None:
    """Turn an optional pass on or off, for what is traced from now on.

    Raises:
        UsageError: There is no such pass, or `on` is no bool.
    """
    global _off
    if name not in OPTIONAL:
        raise unknown_name("pass", name, OPTIONAL)
    if not isinstance(on, bool):
        raise UsageError(f"pass {name!r} is on (True) or off (False), not {on!r}")
    _off = _off - {name} if on else _off | {name}


def switched_off() -> frozenset[str]:
    """Give the names of the optional passes that are off."""
    return _off


__all__ = ["OPTIONAL", "bucket", "optimize", "order_reads", "prune", "switch", "switched_off"]
