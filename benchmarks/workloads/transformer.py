"""A transformer's encoder block, the normalisations behind the sums: attention, two dense layers.

Source: Vaswani et al., "Attention is all you need" (2017), section 3.1.
"""

from __future__ import annotations

import numpy as np

from workloads.base import Array, Workload, uniform, zeros

ROWS, TOKENS, WIDTH, HEADS, HIDDEN = 16, 64, 256, 4, 1024
NORM_EPSILON = 1e-5
PROJECTIONS = ("query", "key", "value", "output")


def _weights(random: np.random.Generator) -> dict[str, Array]:
    made = {}
    for name in PROJECTIONS:
        made[name] = uniform(random, WIDTH, WIDTH, fan=2 * WIDTH)
        made[f"{name}_bias"] = zeros(WIDTH)
    return made | {
        "gamma0": np.ones(WIDTH, np.float32),
        "beta0": zeros(WIDTH),
        "kernel0": uniform(random, WIDTH, HIDDEN, fan=WIDTH + HIDDEN),
        "bias0": zeros(HIDDEN),
        "kernel1": uniform(random, HIDDEN, WIDTH, fan=WIDTH + HIDDEN),
        "bias1": zeros(WIDTH),
        "gamma1": np.ones(WIDTH, np.float32),
        "beta1": zeros(WIDTH),
    }


def _batch(random: np.random.Generator, rows: int) -> tuple[Array, ...]:
    shape = (rows, TOKENS, WIDTH)
    return random.standard_normal(shape, np.float32), random.standard_normal(shape, np.float32)


CASE = Workload(
    "transformer",
    f"transformer block {WIDTH} wide, {HEADS} heads, {TOKENS} tokens, batch {ROWS}",
    (("ours", 2), ("pytorch", 2), ("pytorch-fused", 2)),
    _weights,
    _batch,
    ROWS,
)
