"""Signatures of calls: calls with equal signatures share a trace."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from allreduce.devices import as_array, offers_gpu_memory, options
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core import pytree, seed
from allreduce.graph.core.pass_switches import switched_off
from allreduce.graph.core.scope import surroundings, users_line
from allreduce.graph.core.spec import BATCH, Spec, show
from allreduce.graph.core.tensor import ConcreteTensor, EagerTensor
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.graph.trace.rank_digest import BatchDigest
from allreduce.graph.trace.replica import StepInfo
from allreduce.graph.trace.trace import Trace
from allreduce.graph.trace.variable import Variable

# A tuple, because a union would be made anew for each argument of each call.
_TENSORS, _ARRAYS = (ConcreteTensor, EagerTensor), (np.ndarray, np.generic)


# Whether an argument is a share of a batch, its shape, of a share behind its rows, and its dtype.
_Look = tuple[bool, tuple[int, ...], np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Input:
    """An array among the arguments; `varies` if each replica has its own."""

    spec: Spec
    varies: bool


@dataclass(slots=True)
class Arguments:
    """The arguments of a call, flattened.

    Attributes:
        key: The signature; calls with equal keys share a trace.
        feeds: For each array among the leaves, its value on each local replica.
        around: The rest of the key: device scopes, passes that are off, checks of numerics, threads
            and the seed, which random operators store in their keys.
        seed: The seed in `around`.
        rows: The samples of each local replica; None if no argument is a share of a batch.
        offsets: The index of each replica's first row in the global batch.
        rows_per_replica: The rows of every replica of any rank; None if unknown.
        batch_digests: The digests of batches that must be equal on all ranks.
        looks: A summary for quick comparison, if each argument is a positional array or a share of
            a batch; None otherwise.
    """

    structure: Any
    key: Hashable
    inputs: list[Input | None]
    feeds: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    around: tuple[Hashable, ...] = ()
    seed: int | None = None
    rows: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    rows_per_replica: tuple[int, ...] | None = None
    batch_digests: tuple[BatchDigest, ...] = ()
    looks: tuple[_Look, ...] | None = None

    def without_values(self) -> Arguments:
        """Return a copy for comparison with later calls that keeps no array alive."""
        return replace(self, structure=None, feeds=[])

    def step_infos(self, local_replicas: int, total: int, step: int) -> list[StepInfo]:
        """Return the step information of each local replica; all ranks have `total` replicas."""
        rows = self.rows or (1,) * local_replicas
        offsets = self.offsets or (0,) * local_replicas
        rows_per_replica = (
            rows
            if self.rows_per_replica is None and local_replicas == total
            else self.rows_per_replica
        )
        each = zip(rows, offsets, strict=True)
        return [StepInfo(count, offset, step, rows_per_replica) for count, offset in each]

    def placeholders(self, trace: Trace) -> Any:
        """Rebuild the arguments with placeholders in place of arrays."""
        inputs = iter(enumerate(self.inputs))

        def rebuild(leaf: Any) -> Any:
            index, found = next(inputs)
            if found is None:
                return leaf
            return trace.placeholder(found.spec, f"argument {index}", varies=found.varies)

        return pytree.map_leaves(rebuild, self.structure)


def take_apart(structure: Any, local_replicas: int, like: Arguments | None = None) -> Arguments:
    """Flatten a call's arguments and compute their signature.

    Args:
        structure: (args, kwargs), nested, of PerReplica values, arrays, variables, Python values.
        local_replicas: The number of values that a PerReplica must have.
        like: The arguments of an earlier call; if these look alike, they share its key.
    """
    again = None if like is None else _alike(structure, local_replicas, like)
    if again is not None:
        return again
    found, keys = Arguments(structure, None, []), []
    for leaf in pytree.leaves(structure):
        array, key = _describe(leaf, found, local_replicas)
        found.inputs.append(array)
        keys.append(key)
    found.seed, found.around = seed.fixed(), _around()
    found.key = (pytree.treedef(structure, ordered=True), tuple(keys), found.around)
    args, kwargs = structure
    looks = [look for look in map(_look, args) if look is not None]
    if type(args) is tuple and len(looks) == len(args) and not kwargs:
        found.looks = tuple(looks)
    return found


def _look(leaf: Any) -> _Look | None:
    if type(leaf) is PerReplica and leaf.is_batch:
        return True, leaf.values[0].shape[1:], leaf.values[0].dtype
    return (False, leaf.shape, leaf.dtype) if type(leaf) is np.ndarray else None


def _around() -> tuple[Hashable, ...]:
    chosen = options.current()
    return (
        *(surroundings(), switched_off()),
        *(chosen.check_numerics, chosen.sync_errors, chosen.inter_op_threads, seed.fixed()),
    )


def _alike(structure: Any, replicas: int, like: Arguments) -> Arguments | None:
    """Describe a call that differs from another one in its values and rows only; None if unsure.

    Steps are called so again and again. A process that returns to a core finds cold caches, in
    which each of our functions costs several times as much: with 8 processes on 2 cores a step took
    4.6 ms with 299 calls of functions, and 3.3 with 168.
    """
    args, kwargs = structure
    if like.looks is None or kwargs or type(args) is not tuple or len(args) != len(like.looks):
        return None
    found = Arguments(
        *(structure, like.key, like.inputs),
        around=like.around,
        seed=like.seed,
        looks=like.looks,
    )
    for leaf, (is_share, shape, dtype) in zip(args, like.looks, strict=True):
        if not is_share:
            if type(leaf) is not np.ndarray or leaf.shape != shape or leaf.dtype != dtype:
                return None
            found.feeds.append((leaf,) * replicas)
            continue
        if type(leaf) is not PerReplica or not leaf.is_batch or len(leaf.values) != replicas:
            return None
        for value in leaf.values:
            if value.shape[1:] != shape or value.dtype != dtype:
                return None
        found.feeds.append(leaf.values)
        _join_batch(leaf, found)
    return found if _around() == like.around else None


def _describe(leaf: Any, found: Arguments, replicas: int) -> tuple[Input | None, Hashable]:
    if isinstance(leaf, PerReplica):
        _check_parts(leaf, replicas)
        first = leaf.values[0]
        _check_dtype(first)
        found.feeds.append(leaf.values)
        if not leaf.is_batch:
            each = Spec(first.shape, first.dtype)
            return Input(each, varies=True), ("each", each.shape, each.dtype)
        _join_batch(leaf, found)
        spec = Spec((BATCH, *first.shape[1:]), first.dtype)
        return Input(spec, varies=True), ("batch", spec.shape, spec.dtype)
    if isinstance(leaf, _TENSORS):
        leaf = leaf.value
    if isinstance(leaf, _ARRAYS) or hasattr(leaf, "__dlpack__") or offers_gpu_memory(leaf):
        array = as_array(leaf)
        _check_dtype(array)
        found.feeds.append((array,) * replicas)
        spec = Spec(array.shape, array.dtype)
        return Input(spec, varies=False), ("array", spec.shape, spec.dtype)
    if isinstance(leaf, Variable):
        return None, ("variable", leaf)
    if not isinstance(leaf, Hashable):
        raise UsageError(
            f"{users_line()}: an argument of a traced function is a {type(leaf).__name__}, which "
            "cannot be hashed; pass arrays, or hashable Python values"
        )
    # 0.0 == -0.0, but they are not the same constant.
    return None, (type(leaf), leaf.hex() if type(leaf) is float else leaf)


def _check_dtype(array: np.ndarray) -> None:
    if array.dtype.kind not in "fiub":
        raise UsageError(
            f"{users_line()}: an argument of a traced function is an array of {array.dtype}; steps "
            "take arrays of floats, integers and booleans"
        )


def _check_parts(leaf: PerReplica, replicas: int) -> None:
    if len(leaf.values) != replicas:
        raise UsageError(
            f"a PerReplica argument has {len(leaf.values)} values, but this process has {replicas} "
            "replicas; use strategy.distribute_dataset to make them"
        )
    skip = 1 if leaf.is_batch else 0
    if len({(value.shape[skip:], value.dtype) for value in leaf.values}) > 1:
        shapes = ", ".join(f"{value.dtype}{show(value.shape)}" for value in leaf.values)
        raise ShapeError(f"replicas got arrays that differ in more than their rows: {shapes}")


def _join_batch(leaf: PerReplica, found: Arguments) -> None:
    rows = tuple(len(value) for value in leaf.values)
    if found.rows not in (None, rows):
        raise ShapeError(
            f"arguments of one step have different rows per replica: {found.rows} and {rows}"
        )
    # One made by hand may not know of the other ranks' rows; its offsets count its own ones only.
    if found.rows is None or (found.rows_per_replica is None and leaf.rows_per_replica is not None):
        found.rows, found.offsets, found.rows_per_replica = (
            rows,
            leaf.offsets,
            leaf.rows_per_replica,
        )
    if leaf.digest is not None:
        found.batch_digests += (leaf.digest,)
