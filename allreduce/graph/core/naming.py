"""Default names of variables, models and layers."""

from __future__ import annotations

import re

from allreduce.graph.core import seed

_counts: dict[str, int] = {}
_counted_since = 0


def snake_case(name: str) -> str:
    """Convert a class name to snake case as Keras does: `MaxPool2D` becomes `max_pool2d`."""
    spaced = re.sub(
        r"(?<=[a-z])(?=[A-Z])|(?<=[0-9])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name
    )
    return spaced.lower().strip("_")


def unique_name(base: str) -> str:
    """Number a name: `sequential`, `sequential_1`, …

    Initial values depend on names, so `ar.set_seed` restarts the numbers. A program that sets the
    seed twice in one process gets the same values twice.
    """
    global _counted_since
    if _counted_since != seed.times_set():
        _counted_since = seed.times_set()
        _counts.clear()
    count = _counts.get(base, 0)
    _counts[base] = count + 1
    return f"{base}_{count}" if count else base


def own_part(name: str) -> str:
    """Strip a model's own name, whose number counts the models of one process."""
    return name.partition("/")[2] or name
