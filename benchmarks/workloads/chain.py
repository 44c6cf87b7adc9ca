"""A chain of eight arithmetic operations on ten million numbers, and the memory's limit."""

from __future__ import annotations

from typing import Any

import numpy as np

from workloads.base import Array, Workload

SIZE = 10_000_000
# The operations on x, in order: the name in NumPy, and the other operand.
LINKS = (
    *(("multiply", 1.5), ("add", 0.25), ("multiply", 0.75), ("subtract", 0.5)),
    *(("multiply", 1.25), ("add", 0.125), ("divide", 1.75), ("subtract", 0.0625)),
)


def apply(namespace: Any, x: Any) -> Any:
    """Return the chain's value, by the functions of a module with NumPy's names."""
    for name, operand in LINKS:
        x = getattr(namespace, name)(x, operand)
    return x


def _batch(random: np.random.Generator, rows: int) -> tuple[Array, ...]:
    return (random.random(rows, np.float32),)


CASE = Workload(
    "chain",
    "8 operations on 10⁷ floats",
    (("ours", 1), ("numpy", 1), ("bandwidth", 1)),
    lambda random: {},
    _batch,
    SIZE,
    agreement=1e-5,
)
