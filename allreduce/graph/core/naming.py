"""Names of variables, models and layers that were not given one."""

from __future__ import annotations

import re

from allreduce.graph.core import seed

_counts: dict[str, int] = {}
_counted_since = 0


def snake_case(name: str) -> str:
    """Write a class's name as Keras writes it in names: `MaxPool2D` becomes `max_pool2d`."""
    spaced = re.sub(
        r"(?<=[a-z])(?=[A-Z])|(?<=[0-9])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name
    )
    return spaced.lower().strip("_")


def unique_name(base: str) -> str:
    """Number a name: `sequential`, `sequential_1`, …

    Initial values depend on names, so `ar.set_seed` starts the numbers anew: what follows it then
    repeats itself within one process too.
    """
    global _counted_since
    if _counted_since != seed.times_set():
        _counted_since = seed.times_set()
        _counts.clear()
    count = _counts.get(base, 0)
    _counts[base] = count + 1
    return f"{base}_{count}" if count else base


def own_part(name: str) -> str:
    """Leave out a model's own name: its number counts the models of one process."""
    return name.partition("/")[2] or name
