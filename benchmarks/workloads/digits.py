"""The digits example's network: on few processes, and on more than cores.

In the example all processes share a batch of 128: with eight of them each has 16 samples, and the
fixed cost of a step is paid eight times instead of twice. With a separate batch per process (weak
scaling), the number of samples grows as well.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workloads.base import Array, Workload

ROWS, PIXELS, UNITS, CLASSES, DROPPED = 128, 64, (256, 128), 10, 0.3


def _batch(random: np.random.Generator, rows: int) -> tuple[Array, ...]:
    return random.random((rows, PIXELS), np.float32), random.integers(0, CLASSES, rows)


CASE = Workload(
    "digits",
    f"the digits example, batch {ROWS} of all processes",
    (("ours", 2), ("ours", 8)),
    lambda random: {},
    _batch,
    ROWS,
    shared=True,
    agreement=None,  # the dropped elements differ
    mpi=True,
)
EACH = replace(
    CASE,
    name="digits-each",
    title=f"the digits example, batch {ROWS // 2} of each process",
    rows=ROWS // 2,
    shared=False,
)
