"""`PerReplica`: one array for each local replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from allreduce.devices import as_array
from allreduce.errors import UsageError
from allreduce.graph.core.host_future import HostFuture, Output, arrived
from allreduce.graph.trace.rank_digest import BatchDigest
from allreduce.keywords import explain


@dataclass(frozen=True, slots=True)
class PerReplica:
    """One array per replica of this process.

    Attributes:
        values: The arrays, in the order of the replicas.
        weights: The number of samples of each array; the number of rows of a share of a batch.
        offsets: The index of each share's first row in the global batch.
        rows_per_replica: The number of samples of each replica of any rank; None if unknown.
        digest: The digest of the global batch, if it must be equal on all ranks.
        is_batch: Whether the values are shares of a batch; by default they are if each has as many
            rows as its weight says.

    Raises:
        UsageError: There are not as many weights or offsets as values.
    """

    __leaf__: ClassVar[bool] = True  # for `pytree`

    values: tuple[np.ndarray, ...]
    weights: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    is_batch: bool | None = None
    rows_per_replica: tuple[int, ...] | None = None
    digest: BatchDigest | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.values, (list, tuple)) or not self.values:
            raise UsageError(
                "PerReplica takes a tuple with one array per local replica, got "
                f"{type(self.values).__name__} {self.values!r:.60}"
            )
        # Lists, and no generators: three of these are made in each step.
        values = tuple([as_array(value) for value in self.values])
        rows = tuple([len(value) if value.ndim else 1 for value in values])
        try:
            weights = tuple(self.weights) or rows
            negative = min(weights) < 0
        except TypeError:
            negative = True
        if negative:
            raise UsageError(
                "PerReplica takes weights as a tuple with a number of samples per local replica, "
                f"got {self.weights!r:.60}"
            )
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
        rows_per_replica: tuple[int, ...] | None,
    ) -> PerReplica:
        """Wrap a step's outputs; reading one waits until its copy to the host is done."""
        arrays = tuple([each for each in outputs if not isinstance(each, HostFuture)])
        if len(arrays) == len(outputs):
            return cls(arrays, weights, offsets, is_batch, rows_per_replica)
        return _Pending(outputs, weights, offsets, is_batch, rows_per_replica)

    @property
    def is_pending(self) -> bool:
        """Whether reading the values may wait for a device."""
        return False

    def __repr__(self) -> str:
        shown = ", ".join(f"{value!s:.60}" for value in self.values)
        return f"PerReplica([{shown}], weights={list(self.weights)})"


PerReplica.__init__ = explain()(PerReplica.__init__)  # type: ignore[method-assign]


class _Pending(PerReplica):
    """Values whose copies to the host may not be done."""

    __slots__ = ("_pending",)

    def __init__(
        self,
        coming: tuple[Output, ...],
        weights: tuple[int, ...],
        offsets: tuple[int, ...],
        is_batch: bool,
        rows_per_replica: tuple[int, ...] | None,
    ) -> None:
        put = object.__setattr__  # it is frozen
        put(self, "_pending", coming)
        put(self, "weights", weights)
        put(self, "offsets", offsets)
        put(self, "is_batch", is_batch)
        put(self, "rows_per_replica", rows_per_replica)
        put(self, "digest", None)

    @property
    def is_pending(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:  # of an unset attribute
        if name != "values":
            raise AttributeError(f"a PerReplica has no {name!r}", name=name, obj=self)
        object.__setattr__(self, "values", tuple(map(arrived, self._pending)))
        return self.values
