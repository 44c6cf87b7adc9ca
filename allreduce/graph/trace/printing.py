"""`ar.print`: values of a step, printed when the step gets there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from allreduce.devices.names import DeviceName
from allreduce.graph.core import pytree
from allreduce.graph.core.tensor import ConcreteTensor, Tensor, TracedTensor
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.trace import current_trace
from allreduce.graph.trace.variable import Variable


def print_values(*values: Any, sep: str = " ") -> None:
    """Print tensors and other values; inside `ar.function` in every step, in the program's order.

    Every replica prints its own, with its number where there are several. A replica without
    samples prints nothing that depends on them.

    Args:
        values: Tensors and variables, also in lists, tuples and dicts, are printed with the values
            they have then; all else as `print` would while tracing.
        sep: Between two of them.
    """
    trace = current_trace()
    tensors: list[TracedTensor] = []

    def part(leaf: Any) -> Any:
        tensor = as_tensor(leaf) if isinstance(leaf, Tensor | Variable) else None
        if isinstance(tensor, TracedTensor):
            tensors.append(tensor)
            return _Printed(len(tensors) - 1)
        return tensor.value if isinstance(tensor, ConcreteTensor) else leaf

    parts = tuple(pytree.map_leaves(part, value) for value in values)
    if trace is None:
        say([], parts, sep)
    else:
        # What does not change is written now: it may be something else when the step runs.
        fixed = tuple(each if _open(each) else str(each) for each in parts)
        trace.effect("print", tensors, {"parts": fixed, "sep": sep}, (), DeviceName())


print_values.__name__ = print_values.__qualname__ = "print"


@dataclass(frozen=True, slots=True)
class _Printed:
    """Stands for the value of a tensor."""

    __leaf__: ClassVar[bool] = True  # of the structures that `nest` takes apart

    index: int


@dataclass(frozen=True, slots=True)
class _AsText:
    """An array that looks in a list as it does alone."""

    array: np.ndarray

    def __repr__(self) -> str:
        return str(self.array)


def _open(part: Any) -> bool:
    return any(isinstance(leaf, _Printed) for leaf in pytree.leaves(part))


def say(values: Sequence[Any], parts: Sequence[Any], sep: str, who: str = "") -> None:
    """Write one line; lines of several replicas do not mix."""

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, _Printed):
            leaf = values[leaf.index]
        return _AsText(leaf) if isinstance(leaf, np.ndarray) else leaf

    words = [str(pytree.map_leaves(value_of, part)) for part in parts]
    sys.stdout.write(f"{who}{sep.join(words)}\n")
    sys.stdout.flush()
