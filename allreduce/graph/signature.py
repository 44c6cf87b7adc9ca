"""What a call looks like: calls of one signature share a trace."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph import nest
from allreduce.graph.per_replica import PerReplica
from allreduce.graph.spec import BATCH, Spec, show
from allreduce.graph.tensor import ConcreteTensor
from allreduce.graph.trace import Trace
from allreduce.graph.variable import Variable


@dataclass(slots=True)
class Arguments:
    """A call's arguments, taken apart.

    Attributes:
        key: Equal for calls that one trace serves.
        feeds: For each array among the leaves its value on each local replica.
        rows: Samples per local replica, or None where no argument is a share of a batch.
        offsets: Where each replica's first row lies in the global batch.
    """

    structure: Any
    key: Hashable
    specs: list[Spec | None]
    feeds: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    rows: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None

    def placeholders(self, trace: Trace) -> Any:
        """Rebuild the arguments with placeholders in place of arrays."""
        specs = iter(enumerate(self.specs))

        def rebuild(leaf: Any) -> Any:
            index, spec = next(specs)
            return leaf if spec is None else trace.placeholder(spec, f"argument {index}")

        return nest.map_leaves(rebuild, self.structure)


def take_apart(structure: Any, local_replicas: int) -> Arguments:
    """Describe a call's arguments.

    Args:
        structure: (args, kwargs), nested; leaves are PerReplica values, arrays, variables, Python
        values. local_replicas: How many values a PerReplica has to have.

    Raises:
        UsageError, ShapeError: PerReplica arguments do not fit the replicas or each other.
    """
    leaves = nest.leaves(structure)
    found = Arguments(structure, None, [])
    keys: list[Hashable] = []
    for leaf in leaves:
        spec, key = _describe(leaf, found, local_replicas)
        found.specs.append(spec)
        keys.append(key)
    found.key = (nest.outline(structure), tuple(keys))
    return found


def _describe(leaf: Any, found: Arguments, replicas: int) -> tuple[Spec | None, Hashable]:
    if isinstance(leaf, PerReplica):
        _join_batch(leaf, found, replicas)
        first = leaf.values[0]
        spec = Spec((BATCH, *first.shape[1:]) if first.ndim else (), first.dtype)
        found.feeds.append(leaf.values)
        return spec, ("batch", spec.shape, spec.dtype)
    if isinstance(leaf, ConcreteTensor):
        leaf = leaf.value
    if isinstance(leaf, np.ndarray | np.generic) or hasattr(leaf, "__dlpack__"):
        array = np.asarray(leaf)
        found.feeds.append((array,) * replicas)
        return Spec(array.shape, array.dtype), ("array", array.shape, array.dtype)
    if isinstance(leaf, Variable):
        return None, leaf
    if not isinstance(leaf, Hashable):
        raise UsageError(
            f"an argument of a traced function is a {type(leaf).__name__}, which cannot be hashed; "
            "pass arrays, or hashable Python values"
        )
    return None, (type(leaf), leaf)


def _join_batch(leaf: PerReplica, found: Arguments, replicas: int) -> None:
    if len(leaf.values) != replicas:
        raise UsageError(
            f"a PerReplica argument has {len(leaf.values)} values, but this process has {replicas} "
            "replicas; use strategy.distribute_dataset to make them"
        )
    specs = {(value.shape[1:], value.dtype) for value in leaf.values}
    if len(specs) > 1:
        shapes = ", ".join(f"{value.dtype}{show(value.shape)}" for value in leaf.values)
        raise ShapeError(f"replicas got arrays that differ in more than their rows: {shapes}")
    if not leaf.values[0].ndim:
        return
    rows = tuple(len(value) for value in leaf.values)
    if found.rows is None:
        found.rows, found.offsets = rows, leaf.offsets
    elif found.rows != rows:
        raise ShapeError(
            f"arguments of one step have different rows per replica: {found.rows} and {rows}"
        )
