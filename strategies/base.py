"""The base class of strategies: a scope, steps on every replica, and reductions over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from allreduce.comm import Communicator, exchange, init, replica_communicators, world
from allreduce.data import DistributedDataset
from allreduce.devices import DeviceName, blas_threads, limit_blas_threads
from allreduce.devices.integers import integer
from allreduce.errors import MismatchError, ShapeError, UsageError, unknown_name
from allreduce.events import counted
from allreduce.graph import PerReplica, Replicator, scope_of
from allreduce.graph.consistency import trace_failure
from allreduce.graph.consistency.rank_check import Fact
from allreduce.graph.core import pytree
from allreduce.graph.trace.trace import check_outside
from allreduce.keywords import Refusing, explain
from allreduce.training.facts import check_equal, option, raising_on_all_ranks
from allreduce.training.ranks import gather_integers, gather_rows

REDUCTIONS = ("sum", "mean")


class Strategy(Refusing, Replicator):
    """Replicates the objects made in its scope over devices, and keeps the replicas equal.

    Args:
        owned: The devices of each of this process's replicas.
        first_replica: The id of this process's first replica.
        total: The number of replicas on all ranks.
        here: The number of processes on this host, and the world's generation, of a strategy whose
            processes are no world; None to ask the world.
    """

    def __init__(
        self,
        owned: Sequence[Sequence[DeviceName]],
        first_replica: int,
        total: int,
        here: tuple[int, int] | None = None,
    ) -> None:
        super().__init__([own[0] for own in owned], first_replica, total, owned)
        self._communicator: Communicator | None = None
        processes, self.generation = here or (world().local_size, world().generation)
        # All processes of a host have as many replicas as this one; they share its cores.
        limit_blas_threads(blas_threads(len(owned) * processes))

    def __repr__(self) -> str:
        return f"{type(self).__name__} with {counted(self.num_replicas_in_sync, 'replica')}"

    @property
    def communicator(self) -> Communicator:
        """The communicator with one member per process; the same one as `ar.init()`.

        It stays the same after it was closed and `ar.init()` made another one.
        """
        if self._communicator is None:
            self._communicator = init()
        return self._communicator

    def replica_communicators(self) -> list[Communicator]:
        """Make the communicators of this process's replicas; all ranks call it in their first step.

        Ranks first meet in `communicator`, which detects at once a rank that has left; the store,
        used to make the new one, detects only deaths.

        Raises:
            PeerLostError: A rank has left, or died.
            MismatchError: A rank has raised in place of its step, or makes another call.
            ClosedError: This rank has closed `communicator`.
        """
        if self.communicator.size > 1:
            try:
                exchange(self.communicator, "the first step", np.zeros(0, np.int64))
            except MismatchError as error:  # a rank may have raised in its first step
                trace_failure.attach_traceback(self.communicator, error)
                raise
        return replica_communicators(world(), self.local_replicas, name="replicas")

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Replicate the layers, variables and optimizers made in the block."""
        with scope_of(self):
            yield self

    @explain()
    def distribute_dataset(self, dataset: Iterable[Any]) -> DistributedDataset:
        """Split a dataset's global batches into one contiguous part per replica, prefetching one.

        Args:
            dataset: A re-iterable of tuples or dicts of arrays `(rows, …)`, equal on all ranks: a
                step compares a sample. A generator cannot be iterated anew for each epoch and is
                refused; pass an object whose `__iter__` makes one, or a list. If rows do not
                divide evenly, the first replicas take one more.
        """
        return DistributedDataset(dataset, self)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """List a value's parts on this process's replicas; any other value is one part."""
        return value.values if isinstance(value, PerReplica) else (value,)

    @explain()
    def reduce(self, op: str, value: Any, axis: int | None = None) -> Any:
        """Reduce a value over all replicas of all ranks; a collective call.

        Args:
            op: "sum" or "mean".
            value: A PerReplica, or a structure of them; a plain value counts as every replica's.
            axis: The axis of each part to reduce, too; None reduces over replicas only, and a mean
                then weights each part by its rows.

        Returns:
            Arrays, or NumPy scalars; equal on all ranks. Sums and means of floats have their dtype
            and are made in float64; sums of integers are int64 or uint64, means of them float64.

        Raises:
            UsageError: The operation is unknown, a PerReplica has not one part for each of this
                process's replicas, or no replica has anything to take the mean of.
            ShapeError: The parts have different shapes, or no such axis.
            MismatchError: Ranks have parts of different dtypes or shapes, or one rank's request is
                invalid; on all ranks.
        """
        check_outside("reduce", "use ar.all_reduce there")
        with raising_on_all_ranks(self, "reduce"):
            if op not in REDUCTIONS:
                raise unknown_name("reduction", op, REDUCTIONS)
            if axis is not None:
                axis = integer("reduce's axis", axis)
            value = pytree.map_leaves(self._per_replica, value)
            for leaf in pytree.leaves(value):
                _check_parts(leaf.values, axis)
        # In every call: a rank that skipped the comparison would not meet one that differs.
        facts = {"op": option(op), "axis": option(axis), "the value": _kind(value, axis)}
        check_equal(self, "reduce", facts)
        return pytree.map_leaves(lambda leaf: self._reduce(op, leaf, axis), value)

    def _per_replica(self, leaf: Any) -> PerReplica:
        if isinstance(leaf, PerReplica):
            self._check_number(leaf)
            return leaf
        one = (1,) * self.local_replicas
        return PerReplica((np.asarray(leaf),) * self.local_replicas, one, is_batch=False)

    def _check_number(self, leaf: PerReplica) -> None:
        if len(leaf.values) != self.local_replicas:
            raise UsageError(
                f"a PerReplica has one part for each replica of this process, "
                f"{self.local_replicas}, but this one {len(leaf.values)}"
            )

    def _reduce(self, op: str, leaf: PerReplica, axis: int | None) -> Any:
        kind = leaf.values[0].dtype
        if op == "sum":
            return self._sum(leaf.values, axis).astype(_sum_dtype(kind), copy=False)[()]
        parts = [_weighted(*each, axis) for each in zip(leaf.values, leaf.weights, strict=True)]
        *total, count = self.sum_over_ranks("a mean", np.sum(parts, axis=0)).tolist()
        if not count:
            raise UsageError("the mean of nothing was asked for: no replica had any rows")
        shape = _without(leaf.values[0].shape, axis)
        means = np.asarray(total, np.float64).reshape(shape) / count
        return means.astype(kind if kind.kind == "f" else np.float64, copy=False)[()]

    def _sum(self, values: Sequence[np.ndarray], axis: int | None) -> np.ndarray:
        wide = [value.astype(_carrier(value.dtype)) for value in values]
        sums = wide if axis is None else [np.asarray(value.sum(axis=axis)) for value in wide]
        total = np.asarray(sum(sums[1:], start=sums[0]))
        if total.dtype != np.uint64:
            return self.sum_over_ranks("a sum", total)
        # Modulo 2**64 sums of int64 and uint64 have the same bits, and collectives know int64.
        return self.sum_over_ranks("a sum", total.view(np.int64)).view(np.uint64)

    @explain()
    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate the replicas' parts along an axis, over all ranks; all of them call it.

        Raises:
            UsageError: A PerReplica has not one part for each of this process's replicas.
            ShapeError: Parts differ in more than this axis, or do not have it.
            MismatchError: Ranks have different axes, or parts of different dtypes or shapes, or one
                of them has none that can be gathered; on all ranks.
        """
        check_outside("gather", "use ar.all_gather there")
        return pytree.map_leaves(lambda leaf: self._gather(leaf, axis), value)

    def _gather(self, leaf: Any, axis: int) -> np.ndarray:
        with raising_on_all_ranks(self, "gather"):
            axis = integer("gather's axis", axis)
            if isinstance(leaf, PerReplica):
                self._check_number(leaf)
            parts = [np.asarray(part) for part in self.local_results(leaf)]
            if any(part.ndim == 0 for part in parts):
                raise UsageError("scalars cannot be gathered along an axis; reduce them instead")
            _check_parts(parts, axis)
            local = np.moveaxis(np.concatenate(parts, axis=axis), axis, 0)
        facts = {"axis": option(axis), "the dtype or shape of a part": _rows(local)}
        check_equal(self, "gather", facts)
        counts = gather_integers(self, "how many rows to gather", [len(local)])[:, 0].tolist()
        return np.moveaxis(gather_rows(self, local, counts), 0, axis)

    experimental_distribute_dataset = distribute_dataset
    experimental_local_results = local_results


def _rows(rows: np.ndarray) -> Fact:
    sizes = ", ".join(["rows", *map(str, rows.shape[1:])])
    return Fact(f"{rows.dtype} ({sizes})", "cast or reshape it before gathering")


def _kind(value: Any, axis: int | None) -> Fact:
    """Make a fact of the properties that parts of a structure need in common to be added."""
    paths = pytree.paths(value)
    parts = [leaf.values[0] for leaf in pytree.leaves(value)]
    shown = ", ".join(
        f"{''.join(f'[{key!r}]' for key in path)} {part.dtype} {_without(part.shape, axis)}".strip()
        for path, part in zip(paths, parts, strict=True)
    )
    return Fact(shown, "reduce values of the same dtypes and shapes on every rank")


def _check_parts(parts: Sequence[np.ndarray], axis: int | None) -> None:
    """Refuse parts that cannot be combined along an axis, or element by element.

    Raises:
        UsageError: They are no numbers.
        ShapeError: Their shapes differ in more than the axis, or do not have it.
    """
    shapes = [part.shape for part in parts]
    shown = ", ".join(map(str, shapes))
    if parts[0].dtype.kind not in "biuf":
        raise UsageError(f"values of replicas are numbers, not {parts[0].dtype}")
    if axis is not None and not all(-len(shape) <= axis < len(shape) for shape in shapes):
        raise ShapeError(f"the replicas' parts have shapes {shown}; there is no axis {axis} in all")
    if len({_without(shape, axis) for shape in shapes}) > 1:
        hint = "; axis=0 combines their rows" if axis is None else f" in more than axis {axis}"
        raise ShapeError(f"the replicas' parts have shapes {shown}, which differ{hint}")


def _without(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    if axis is None:
        return shape
    return tuple(size for place, size in enumerate(shape) if place != axis % len(shape))


def _weighted(value: np.ndarray, weight: int, axis: int | None) -> np.ndarray:
    """Return one replica's contribution to a mean: the sums of its elements, and their count."""
    wide = value.astype(np.float64)
    if axis is not None:
        wide, weight = np.asarray(wide.sum(axis=axis)), value.shape[axis]
    elif weight:
        wide = wide * weight
    else:
        wide = np.zeros_like(wide)  # a mean over no rows may be NaN, and counts for nothing
    return np.append(wide.reshape(-1), weight)


def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose the type in which values are added up."""
    return np.dtype({"f": np.float64, "u": np.uint64}.get(dtype.kind, np.int64))


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.kind == "f" else _carrier(dtype)
