"""One member's arrays for a fused update."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce import _native
from allreduce.comm import Communicator

COUNT, HEADER = 100_003, 16


class Side:
    """One member's: gradients of ones behind a header, values of zeros, a velocity."""

    def __init__(self, comm: Communicator) -> None:
        made = comm.empty((HEADER + COUNT,), "float32")
        made[:HEADER], made[HEADER:] = 2, 1
        self.header, self.gradients = made[:HEADER], made[HEADER:]
        self.values = comm.empty((COUNT,), "float32")
        self.values[:] = 0
        self.velocity = np.zeros(COUNT, np.float32)
        comm.barrier()

    def momentum(self) -> Any:
        update = _native.sgd_update(self.header, self.velocity)
        update.set(0.5, 0.9, False)
        update.expect(b"", False)
        return update

    def adam(self) -> Any:
        update = _native.adam_update(self.header, self.velocity, np.zeros(COUNT, np.float32))
        update.set(0.1, 0.9, 0.999, 1e-7, 0.0, 1)
        update.expect(b"", False)
        return update
