"""Adam on 20 million parameters: gradients are all-reduced and applied, and cost nothing.

The gradient of each parameter is one number per step and process, so that besides the all-reduce
and the update only filling them in takes time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workloads.base import Array, Workload

PARTS, SIZE = 20, 1_000_000
WEIGHT_DECAY, CLIP_NORM = 0.01, 1.0  # of the second case; all its gradients are clipped


def _weights(random: np.random.Generator) -> dict[str, Array]:
    return {f"part{i}": random.random(SIZE, np.float32) for i in range(PARTS)}


def _batch(random: np.random.Generator, rows: int) -> tuple[Array, ...]:
    return (random.random(rows, np.float32) + 1,)


CASE = Workload(
    "adam",
    "Adam, 20 M parameters",
    (("ours", 2), ("pytorch", 2), ("pytorch-fused", 2)),
    _weights,
    _batch,
    1,
)

CLIPPED = replace(
    CASE, name="adamw-clipped", title="AdamW with clipped norm, 20 M parameters", backward=True
)
