"""What a step's function returned, without the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from allreduce.graph import nest
from allreduce.graph.spec import Dim, Spec
from allreduce.graph.tensor import TracedTensor
from allreduce.graph.trace import as_tensor


@dataclass(frozen=True, slots=True)
class Returned:
    """The structure of a result.

    Attributes:
        structure: What the function returned, with True in place of each tensor.
        batched: Tells for each tensor whether it has one row per sample.
    """

    structure: Any
    batched: tuple[bool, ...]

    def rebuild(self, values: Iterator[Any]) -> Any:
        """Put fetched values where the function returned tensors."""
        return nest.map_leaves(lambda fetched: next(values) if fetched else None, self.structure)


def take_apart(result: Any) -> tuple[Returned, list[TracedTensor]]:
    """Split what a function returned to the trace that is recorded; None stays None."""
    outputs: list[TracedTensor] = []

    def fetch(leaf: Any) -> bool:
        if leaf is None:
            return False
        tensor = as_tensor(leaf)
        assert isinstance(tensor, TracedTensor)
        outputs.append(tensor)
        return True

    structure = nest.map_leaves(fetch, result)
    return Returned(structure, tuple(_is_batched(each.spec) for each in outputs)), outputs


def _is_batched(spec: Spec) -> bool:
    return bool(spec.shape) and isinstance(spec.shape[0], Dim)
