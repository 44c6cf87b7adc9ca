"""One member's arrays for a fused update."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce import _native
from allreduce.comm import Communicator
from allreduce.optim import Adam

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
        update = _native.rule_update("sgd", self.header, [self.velocity])
        update.set([0.5, 0.9, 0.0])
        update.expect(b"", False)
        return update

    def adam(self) -> Any:
        slots = [self.velocity, np.zeros(COUNT, np.float32)]
        update = _native.rule_update("adam", self.header, slots)
        update.set(Adam(0.1).numbers(1))
        update.expect(b"", False)
        return update
