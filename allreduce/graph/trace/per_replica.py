"""Values that differ from replica to replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from allreduce.errors import UsageError
from allreduce.graph.core.host_future import Fetched, Output, arrived
from allreduce.graph.trace.rank_digest import Mark


@dataclass(frozen=True, slots=True)
class PerReplica:
    """One array per replica of this process.

    Attributes:
        values: The arrays, in the order of the replicas.
        weights: How many samples stand behind each: its rows where it is a share of a batch.
        offsets: Where each share's first row lies in the global batch.
        everyone: How many samples each replica of any rank has, where this is known.
        mark: Of the global batch, where all ranks have to have an equal one.
        is_batch: Whether the values are shares of a batch; by default they are if each has as many
            rows as its weight says.

    Raises:
        UsageError: There are not as many weights or offsets as values.
    """

    __leaf__: ClassVar[bool] = True  # of the structures that `nest` takes apart

    values: tuple[np.ndarray, ...]
    weights: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    is_batch: bool | None = None
    everyone: tuple[int, ...] | None = None
    mark: Mark | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.values, (list, tuple)) or not self.values:
            raise UsageError(
                "PerReplica takes a tuple with one array per local replica, got "
                f"{type(self.values).__name__} {self.values!r:.60}"
            )
        # Lists, and no generators: three of these are made in each step.
        values = tuple([np.asarray(value) for value in self.values])
        rows = tuple([len(value) if value.ndim else 1 for value in values])
        weights = tuple(self.weights) or rows
        is_batch = self.is_batch
        if is_batch is None:
            is_batch = values[0].ndim > 0 and weights == rows
        offsets = tuple(self.offsets) or tuple([sum(weights[:i]) for i in range(len(weights))])
        if not len(values) == len(weights) == len(offsets):
            raise UsageError(
                f"PerReplica got {len(values)} values, {len(weights)} weights and {len(offsets)} "
                "offsets; it needs one of each per local replica"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "is_batch", is_batch)

    @classmethod
    def of(
        cls,
        outputs: tuple[Output, ...],
        weights: tuple[int, ...],
        offsets: tuple[int, ...],
        is_batch: bool,
        everyone: tuple[int, ...] | None,
    ) -> PerReplica:
        """Make one of what a step returns; whoever reads what is still copied waits for that."""
        arrays = tuple([each for each in outputs if not isinstance(each, Fetched)])
        if len(arrays) == len(outputs):
            return cls(arrays, weights, offsets, is_batch, everyone)
        return _Coming(outputs, weights, offsets, is_batch, everyone)

    @property
    def is_coming(self) -> bool:
        """Whether to read the values may take a wait for a device."""
        return False

    def __repr__(self) -> str:
        shown = ", ".join(f"{value!s:.60}" for value in self.values)
        return f"PerReplica([{shown}], weights={list(self.weights)})"


class _Coming(PerReplica):
    """Values that devices copy to the host."""

    __slots__ = ("_coming",)

    def __init__(
        self,
        coming: tuple[Output, ...],
        weights: tuple[int, ...],
        offsets: tuple[int, ...],
        is_batch: bool,
        everyone: tuple[int, ...] | None,
    ) -> None:
        put = object.__setattr__  # it is frozen
        put(self, "_coming", coming)
        put(self, "weights", weights)
        put(self, "offsets", offsets)
        put(self, "is_batch", is_batch)
        put(self, "everyone", everyone)
        put(self, "mark", None)

    @property
    def is_coming(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:  # of what is not set yet
        if name != "values":
            raise AttributeError(f"a PerReplica has no {name!r}", name=name, obj=self)
        object.__setattr__(self, "values", tuple(map(arrived, self._coming)))
        return self.values
