"""Passes: each a pure function from a Graph to a Graph, in a file of its own.

Those in `OPTIONAL` only make a program quicker or smaller. Each can be turned off, to find out
which one is to blame for a wrong result; results are the same to rounding without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allreduce.devices import options
from allreduce.errors import UsageError, unknown_name
from allreduce.graph.node import Graph
from allreduce.graph.passes.bucket import bucket
from allreduce.graph.passes.copy_reshapes import copy_reshapes
from allreduce.graph.passes.fold import fold
from allreduce.graph.passes.fuse import fuse
from allreduce.graph.passes.inside import inside
from allreduce.graph.passes.narrow import narrow
from allreduce.graph.passes.order_collectives import order_collectives
from allreduce.graph.passes.order_reads import order_reads
from allreduce.graph.passes.plan_buffers import plan_buffers
from allreduce.graph.passes.prune import prune
from allreduce.graph.passes.simplify import simplify

# In the order in which they run. Pruned is what nothing needs, also after another pass.
_REWRITES: Mapping[str, Callable[[Graph], Graph]] = {
    "prune": prune,
    "fold": fold,
    "simplify": simplify,
    "narrow": narrow,
    "fuse": fuse,
}
# Those that come later, as they need the optimizers' arenas, or the order of the schedule.
OPTIONAL = (*_REWRITES, "bucket", "shard", "plan_buffers")

_off: frozenset[str] = frozenset()


def optimize(graph: Graph) -> Graph:
    """Run the optional passes that are on."""
    for name, run in _REWRITES.items():
        if is_on(name):
            graph = run(graph)
            if name != "prune" and is_on("prune"):
                graph = prune(graph)
    return inside(graph, optimize)


def is_on(name: str) -> bool:
    """Say whether an optional pass is to run."""
    # A chain would hide which of its operations made a NaN, a constant that any did, and a value
    # written over its input what that was.
    chosen = options.current()
    looks = chosen.check_numerics or chosen.sync_errors
    hides = looks and name in ("fold", "fuse", "plan_buffers")
    return name not in _off and not hides


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


__all__ = [
    "OPTIONAL",
    "bucket",
    "copy_reshapes",
    "is_on",
    "optimize",
    "order_collectives",
    "order_reads",
    "plan_buffers",
    "prune",
    "switch",
    "switched_off",
]
