"""Our own side: the same networks, in one process or in several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import allreduce as ar
import numpy as np
from workloads import adam
from workloads.base import Array, Workload

from trainers import ours_alone, ours_steps


def build(name: str, workload: Workload, rank: int, ports: Sequence[int]) -> tuple[int, Any]:
    """Meet the other processes, if there are any, and make this one's part."""
    ar.set_seed(0)
    ar.config.threading.set_intra_op_parallelism_threads(1)
    if workload.name in ("input", "instructions"):
        return 0, ours_alone.SIDES[workload.name](workload)
    if len(ports) == 1 or name == "apart":
        return max(rank, 0), ours_steps.Ours(ours_steps.STEPS[workload.name](workload))
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        step = ours_steps.STEPS[workload.name](workload)
    backward = _filling() if workload.backward else None
    return strategy.communicator.rank, Together(step, strategy, backward)


class Together(ours_steps.Ours):
    """A step of several processes, each with its own samples."""

    def __init__(
        self,
        step: ours_steps.Step,
        strategy: ar.MultiWorkerMirroredStrategy,
        backward: ours_steps.Step | None = None,
    ) -> None:
        super().__init__(step)
        self._strategy = strategy
        self._backward = backward

    def backward(self, *batch: Array) -> Any:
        """Compute a step's gradients, in memory of this process."""
        assert self._backward is not None, "only of some cases"
        return self._backward(*batch)

    def _run(self, *batch: Array) -> Any:
        shares = tuple(ar.PerReplica((each,)) for each in batch)
        return self._strategy.run(self._step, args=shares)

    def number(self, result: Any) -> float:
        return super().number(result.values[0])

    def figures(self, seconds: float) -> dict[str, float]:
        with self._strategy.scope():
            return super().figures(seconds)


def _filling() -> ours_steps.Step:
    """Make what a step of the case adam does before its gradients are reduced."""
    gradients = [ar.Variable(np.zeros(adam.SIZE, np.float32)) for _ in range(adam.PARTS)]

    @ar.function
    def fill(slope: ar.Tensor) -> ar.Tensor:
        value = ar.ops.sum(slope)
        for each in gradients:
            each.assign(ar.ops.broadcast_to(value, (adam.SIZE,)))
        return value

    return fill
