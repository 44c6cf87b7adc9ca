"""What all strategies share: a scope, a step on every replica, and means over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from allreduce.comm import Communicator, init, replica_communicators, world
from allreduce.data import DistributedDataset
from allreduce.devices import DeviceName, blas_threads, limit_blas_threads
from allreduce.errors import UsageError, unknown_name
from allreduce.graph import PerReplica, Replicator, nest, scope_of

REDUCTIONS = ("sum", "mean")


class Strategy(Replicator):
    """Replicates what is made in its scope over devices, and keeps the replicas equal.

    Args:
        devices: This process's replicas' devices.
        first_replica: The id of the first of them among all replicas.
        total: How many replicas there are, over all ranks.
    """

    def __init__(self, devices: Sequence[DeviceName], first_replica: int, total: int) -> None:
        super().__init__(devices, first_replica, total)
        # All ranks of a host bring as many replicas as this one, so that many share its cores.
        limit_blas_threads(blas_threads(len(devices) * world().local_size))

    def __repr__(self) -> str:
        return f"{type(self).__name__} with {self.num_replicas_in_sync} replicas"

    @property
    def communicator(self) -> Communicator:
        """The communicator with one member per process; the same one as `ar.init()`."""
        return init()

    def replica_communicators(self) -> list[Communicator]:
        return replica_communicators(world(), self.local_replicas, name="replicas")

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make the block's layers, variables and optimizers this strategy's."""
        with scope_of(self):
            yield self

    def distribute_dataset(self, dataset: Iterable[Any]) -> DistributedDataset:
        """Cut a dataset's global batches into the replicas' contiguous parts, one batch ahead.

        Args:
            dataset: Iterates tuples or dicts of arrays `(rows, …)`, again and again, equal on all
                ranks. Where rows do not divide evenly, earlier replicas take one more.
        """
        return DistributedDataset(dataset, self)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """List a value's parts on this process's replicas; what is not PerReplica is one part."""
        return value.values if isinstance(value, PerReplica) else (value,)

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Any:
        """Combine what the replicas computed, over all ranks; all of them call it.

        Args:
            op: "sum" or "mean".
            value: A PerReplica, or a structure of them; a plain value counts as every replica's.
            axis: Which axis of each part is reduced as well; None reduces over replicas only, and a
                mean then weights each part by its rows.

        Returns:
            Arrays, or NumPy scalars; equal on all ranks. Sums are made in float64 or int64.

        Raises:
            UsageError: The operation is unknown, or no replica has anything to take the mean of.
        """
        if op not in REDUCTIONS:
            raise unknown_name("reduction", op, REDUCTIONS)
        return nest.map_leaves(lambda leaf: self._reduce(op, leaf, axis), value)

    def _reduce(self, op: str, leaf: Any, axis: int | None) -> Any:
        if not isinstance(leaf, PerReplica):
            part = np.asarray(leaf)
            leaf = PerReplica((part,) * self.local_replicas, (1,) * self.local_replicas)
        sums, counts = zip(*(_part(op, *each, axis) for each in _pairs(leaf)), strict=True)
        total = self.sum_over_ranks(np.asarray(sum(sums[1:], start=sums[0])))
        kind = leaf.values[0].dtype
        if op == "sum":
            return total.astype(kind if kind.kind != "b" else np.int64)[()]
        count = int(self.sum_over_ranks(np.asarray(sum(counts), np.int64))[()])
        if not count:
            raise UsageError("the mean of nothing was asked for: no replica had any rows")
        return (total / count).astype(kind if kind.kind == "f" else np.float64)[()]

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate the replicas' parts along an axis, over all ranks; all of them call it."""
        return nest.map_leaves(lambda leaf: self._gather(leaf, axis), value)

    def _gather(self, leaf: Any, axis: int) -> np.ndarray:
        parts = self.local_results(leaf)
        if any(np.ndim(part) == 0 for part in parts):
            raise UsageError("scalars cannot be gathered along an axis; reduce them instead")
        local = np.moveaxis(np.concatenate(parts, axis=axis), axis, 0)
        return np.moveaxis(self._all_gather_rows(np.ascontiguousarray(local)), 0, axis)

    def _all_gather_rows(self, local: np.ndarray) -> np.ndarray:
        """Concatenate arrays of unequal length by padding them to the longest."""
        communicator = self.communicator
        lengths = communicator.all_gather(np.asarray([len(local)], np.int64))
        longest = int(lengths.max())
        padded = np.zeros((longest, *local.shape[1:]), _carrier(local.dtype))
        padded[: len(local)] = local
        everything = communicator.all_gather(padded)
        rows = np.concatenate(
            [np.arange(rank * longest, rank * longest + n) for rank, n in enumerate(lengths)]
        )
        gathered: np.ndarray = everything[rows].astype(local.dtype)
        return gathered

    experimental_distribute_dataset = distribute_dataset
    experimental_local_results = local_results


def _pairs(leaf: PerReplica) -> Iterator[tuple[np.ndarray, int]]:
    return zip(leaf.values, leaf.weights, strict=True)


def _part(op: str, value: np.ndarray, weight: int, axis: int | None) -> tuple[np.ndarray, int]:
    """Return what one replica adds to the sum, and to the count."""
    wide = value.astype(np.float64 if value.dtype.kind == "f" else np.int64)
    if axis is not None:
        return np.asarray(wide.sum(axis=axis)), value.shape[axis]
    return (wide * weight if op == "mean" else wide), weight


def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose the type in which values travel: itself, or a wider one where collectives lack it."""
    if dtype in (np.float64, np.float32, np.int64, np.int32):
        return dtype
    return np.dtype(np.float32) if dtype == np.float16 else np.dtype(np.int64)
