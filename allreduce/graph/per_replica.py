"""Values that differ from replica to replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allreduce.errors import UsageError


@dataclass(frozen=True, slots=True)
class PerReplica:
    """One array per replica of this process.

    Attributes:
        values: The arrays, in the order of the replicas.
        weights: How many samples stand behind each: its rows where it is a share of a batch.
        offsets: Where each share's first row lies in the global batch.
    """

    values: tuple[np.ndarray, ...]
    weights: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.values:
            raise UsageError("PerReplica needs one value per local replica, got none")
        if not self.weights:
            rows = tuple(len(value) if np.ndim(value) else 1 for value in self.values)
            object.__setattr__(self, "weights", rows)
        if not self.offsets:
            starts = tuple(sum(self.weights[:i]) for i in range(len(self.weights)))
            object.__setattr__(self, "offsets", starts)
        if not len(self.values) == len(self.weights) == len(self.offsets):
            raise UsageError(
                f"PerReplica got {len(self.values)} values, {len(self.weights)} weights and "
                f"{len(self.offsets)} offsets; it needs one of each per local replica"
            )

    def __repr__(self) -> str:
        shown = ", ".join(f"{value!s:.60}" for value in self.values)
        return f"PerReplica([{shown}], weights={list(self.weights)})"
