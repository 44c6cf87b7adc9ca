"""A network of convolutions: two of 3×3, each with pooling behind it, and two dense layers."""

from __future__ import annotations

import numpy as np

from workloads.base import Array, Workload, uniform, zeros

ROWS, SIDE, CHANNELS, CLASSES = 64, 32, 3, 10
FILTERS, UNITS = (32, 64), 128


def _weights(random: np.random.Generator) -> dict[str, Array]:
    first, second = FILTERS
    flat = (SIDE // 4) ** 2 * second  # rows, columns, channels: in this order
    return {
        "conv0": uniform(random, 3, 3, CHANNELS, first, fan=9 * (CHANNELS + first)),
        "conv_bias0": zeros(first),
        "conv1": uniform(random, 3, 3, first, second, fan=9 * (first + second)),
        "conv_bias1": zeros(second),
        "kernel0": uniform(random, flat, UNITS, fan=flat + UNITS),
        "bias0": zeros(UNITS),
        "kernel1": uniform(random, UNITS, CLASSES, fan=UNITS + CLASSES),
        "bias1": zeros(CLASSES),
    }


def _batch(random: np.random.Generator, rows: int) -> tuple[Array, ...]:
    images = random.random((rows, SIDE, SIDE, CHANNELS), np.float32)
    return images, random.integers(0, CLASSES, rows)


CASE = Workload(
    "conv",
    f"conv net {SIDE}×{SIDE}×{CHANNELS}, {FILTERS[0]} and {FILTERS[1]} filters, batch {ROWS}",
    (("ours", 2), ("pytorch", 2), ("pytorch-fused", 2), ("tensorflow", 2)),
    _weights,
    _batch,
    ROWS,
)
