"""`ar.print`: print values when a step computes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.graph.core import pytree
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.tensor import ConcreteTensor, Tensor, TracedTensor
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.trace import current_trace
from allreduce.graph.trace.variable import Variable


def print_values(*values: Any, sep: str = " ") -> None:
    """Print tensors and other values; inside `ar.function`, in every step and in program order.

    Every replica prints its own values, with its number if there are several. A replica without
    samples prints nothing that depends on them.

    Args:
        values: Tensors and variables, also in lists, tuples and dicts, print their values in the
            step; anything else prints as during tracing.
        sep: The separator between values.
    """
    if not isinstance(sep, str):
        raise UsageError(f"{users_line()}: sep is text, not {sep!r:.60}")
    trace = current_trace()
    tensors: list[TracedTensor] = []

    def part(leaf: Any) -> Any:
        tensor = as_tensor(leaf) if isinstance(leaf, Tensor | Variable) else None
        if isinstance(tensor, TracedTensor):
            tensors.append(tensor)
            return Printed(len(tensors) - 1)
        return tensor.value if isinstance(tensor, ConcreteTensor) else leaf

    parts = tuple(pytree.map_leaves(part, value) for value in values)
    if trace is None:
        say([], parts, sep)
    else:
        # Values that are no tensors are formatted now: they may have changed when the step runs.
        fixed = tuple(each if _open(each) else str(each) for each in parts)
        trace.effect("print", tensors, {"parts": fixed, "sep": sep}, (), DeviceName())


print_values.__name__ = print_values.__qualname__ = "print"


@dataclass(frozen=True, slots=True)
class Printed:
    """Represents a tensor in the printed structure."""

    __leaf__: ClassVar[bool] = True  # of the structures that `pytree` takes apart

    index: int


@dataclass(frozen=True, slots=True)
class _AsText:
    """An array whose repr is its str, for printing in lists."""

    array: np.ndarray

    def __repr__(self) -> str:
        return str(self.array)


def _open(part: Any) -> bool:
    return any(isinstance(leaf, Printed) for leaf in pytree.leaves(part))


def say(values: Sequence[Any], parts: Sequence[Any], sep: str, who: str = "") -> None:
    """Print one line; lines of several replicas do not mix."""

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, Printed):
            leaf = values[leaf.index]
        return _AsText(leaf) if isinstance(leaf, np.ndarray) else leaf

    words = [str(pytree.map_leaves(value_of, part)) for part in parts]
    sys.stdout.write(f"{who}{sep.join(words)}\n")
    sys.stdout.flush()
