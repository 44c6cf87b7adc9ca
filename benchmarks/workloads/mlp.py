"""Dense layers alone: large ones, where products decide, and small ones, where overhead does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from workloads.base import Array, Workload, uniform, zeros


def _workload(name: str, sizes: tuple[int, ...], samples: int, *sides: tuple[str, int]) -> Workload:
    def weights(random: np.random.Generator) -> dict[str, Array]:
        made = {}
        for i, (n, m) in enumerate(itertools.pairwise(sizes)):
            made[f"kernel{i}"] = uniform(random, n, m, fan=n + m)
            made[f"bias{i}"] = zeros(m)
        return made

    def batch(random: np.random.Generator, rows: int) -> tuple[Array, ...]:
        return random.random((rows, sizes[0]), np.float32), random.integers(0, sizes[-1], rows)

    title = f"MLP {'-'.join(map(str, sizes))}, batch {samples}"
    return Workload(name, title, sides, weights, batch, samples)


LARGE = _workload(
    "mlp",
    (784, 1024, 1024, 10),
    128,
    *(("ours", 1), ("ours", 2), ("apart", 2), ("numpy", 1)),
    *(("pytorch", 1), ("pytorch-fused", 1), ("pytorch", 2), ("pytorch-fused", 2)),
)
DEVICES = replace(
    LARGE,
    name="devices",
    title="the large MLP on logical devices",
    sides=(("ours", 1), ("devices", 2), ("threads", 2), ("apart", 2)),
)
# 20 M parameters and few samples, so that what follows the backward pass counts: AdamW, clipped.
# PyTorch adds epsilon after the bias correction, ours before: it counts for gradients this small.
CLIPPED = replace(
    _workload(
        "mlp-clipped",
        (1024, 4096, 3072, 1024, 10),
        32,
        *(("ours", 2), ("pytorch", 2), ("pytorch-fused", 2)),
    ),
    agreement=0.05,
)
SMALL = _workload(
    "small", (64, 64, 10), 32, ("ours", 1), ("numpy", 1), ("pytorch", 1), ("pytorch-fused", 1)
)
