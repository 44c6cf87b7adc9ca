"""The digits example's network, 128 samples a step: on few processes, and on more than cores."""

from __future__ import annotations

import numpy as np

from workloads.base import Array, Workload

PIXELS, UNITS, CLASSES, DROPPED = 64, (256, 128), 10, 0.3


def _batch(random: np.random.Generator, rows: int) -> tuple[Array, ...]:
    return random.random((rows, PIXELS), np.float32), random.integers(0, CLASSES, rows)


CASE = Workload(
    "digits",
    "the digits example, batch 128 of all processes",
    (("ours", 2), ("ours", 8)),
    lambda random: {},
    _batch,
    128,
    shared=True,
    agreement=None,  # what is dropped differs
    mpi=True,
)
