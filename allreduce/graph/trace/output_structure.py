"""The structure of a step's result, without the values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np

from allreduce.graph.core import pytree
from allreduce.graph.core.host_future import Output
from allreduce.graph.core.spec import BATCH, Dim, Spec
from allreduce.graph.core.tensor import TracedTensor
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.graph.trace.replica import StepInfo


@dataclass(frozen=True, slots=True)
class OutputStructure:
    """The structure of a result.

    Attributes:
        structure: The function's result, with True for each tensor. Other values, such as None and
            text, are returned unchanged by every step.
        rows_per_sample: For each tensor, its rows per sample of the replica; None if its rows do
            not belong to the replica's own samples, as in `(global_batch, …)`.
    """

    structure: Any
    rows_per_sample: tuple[int | None, ...]

    def rebuild(self, values: Iterator[Any]) -> Any:
        """Insert fetched values into the structure."""
        if self.structure is True:
            return next(values)
        if type(self.structure) in (list, tuple):  # the usual ones, quickly
            for leaf in self.structure:
                if leaf is not True:
                    break
            else:
                return type(self.structure)(values)
        return pytree.map_leaves(
            lambda leaf: next(values) if leaf is True else leaf, self.structure
        )

    def per_replica(
        self, results: Sequence[Sequence[Output]], step_infos: Sequence[StepInfo]
    ) -> Iterator[PerReplica]:
        """Join the replicas' outputs of a step, tensor by tensor."""
        rows_per_replica = step_infos[0].rows_per_replica
        for values, factor in zip(zip(*results, strict=True), self.rows_per_sample, strict=True):
            unit = factor or 1
            yield PerReplica.of(
                values,
                tuple(info.rows * unit for info in step_infos),
                tuple(info.row_offset * unit for info in step_infos),
                factor is not None,
                None
                if rows_per_replica is None
                else tuple(rows * unit for rows in rows_per_replica),
            )


def take_apart(result: Any) -> tuple[OutputStructure, list[TracedTensor]]:
    """Separate the tensors of a function's result from its structure."""
    outputs: list[TracedTensor] = []

    def fetch(leaf: Any) -> Any:
        if _is_plain(leaf):
            return leaf
        tensor = as_tensor(leaf)
        assert isinstance(tensor, TracedTensor)
        outputs.append(tensor)
        return True

    structure = pytree.map_leaves(fetch, result)
    rows = tuple(_rows_per_sample(each.spec) for each in outputs)
    return OutputStructure(structure, rows), outputs


def _is_plain(leaf: Any) -> bool:
    """Return whether a leaf is a Python value that no tensor can be made of."""
    if isinstance(leaf, str | bytes):
        return True
    numeric = isinstance(leaf, Number | np.generic | Dim) or any(
        hasattr(leaf, name) for name in ("__tensor__", "__array__", "__dlpack__", "shape")
    )
    return not numeric and isinstance(leaf, Hashable) and not isinstance(leaf, Iterable)


def _rows_per_sample(spec: Spec) -> int | None:
    rows = spec.shape[0] if spec.shape else None
    return rows.factor if isinstance(rows, Dim) and rows.name == BATCH.name else None
