"""Our own side in one process: a network on all of its logical devices, or one on each.

Each one takes turns like a process: its thread meets none of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import allreduce as ar
import numpy as np
from workloads.base import Array, Workload

from trainers import ours


def build(name: str, workload: Workload, rank: int, ports: Sequence[int]) -> tuple[int, Devices]:
    """Make the network of one device, or that of all."""
    _begin(len(ports))
    devices = [f"CPU:{index}" for index in range(len(ports))]
    if name == "threads":
        return rank, Devices(workload, devices[rank : rank + 1])
    return rank, Devices(workload, devices)


@functools.cache
def _begin(count: int) -> None:
    ar.set_seed(0)
    ar.config.threading.set_intra_op_parallelism_threads(1)
    ar.config.set_logical_devices("CPU", count)


class Devices:
    """A step mirrored over logical devices, each with its own samples."""

    about = ours.Ours.about

    def __init__(self, workload: Workload, devices: Sequence[str]) -> None:
        self._strategy = ar.MirroredStrategy(devices)
        with self._strategy.scope():
            self._step = ours.STEPS[workload.name](workload)

    def step(self, *batches: tuple[Array, ...]) -> Any:
        """Do one step; returns the losses, one per sample.

        Args:
            batches: One for each device.
        """
        shares = tuple(map(ar.PerReplica, zip(*batches, strict=True)))
        return self._strategy.run(self._step, args=shares)

    def number(self, result: Any) -> float:
        return float(np.mean([np.asarray(each) for each in result.values]))

    def figures(self, seconds: float) -> dict[str, float]:
        return {}  # another case reports a replica's memory
