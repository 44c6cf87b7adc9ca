"""`ar.print`: values of a step, printed when the step gets there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from allreduce.graph.tensor import ConcreteTensor, Tensor, TracedTensor
from allreduce.graph.trace import as_tensor, current_trace
from allreduce.graph.variable import Variable


def print_values(*values: Any, sep: str = " ") -> None:
    """Print tensors and other values; inside `ar.function` in every step, in the program's order.

    Every replica prints its own, with its number where there are several. A replica without
    samples prints nothing that depends on them.

    Args:
        values: Tensors and variables are printed with the values they have then; all else as
            `print` would while tracing.
        sep: Between two of them.
    """
    trace = current_trace()
    parts: list[str | int] = []  # texts, and numbers of tensors
    tensors: list[TracedTensor] = []
    for value in values:
        tensor = as_tensor(value) if isinstance(value, Tensor | Variable) else None
        if isinstance(tensor, TracedTensor):
            parts.append(len(tensors))
            tensors.append(tensor)
        elif isinstance(tensor, ConcreteTensor):
            parts.append(str(tensor.value))
        else:
            parts.append(str(value))
    if trace is None:
        say([], parts, sep)
    else:
        trace.effect("print", tensors, {"parts": tuple(parts), "sep": sep}, ())


def say(values: Sequence[Any], parts: Sequence[str | int], sep: str, who: str = "") -> None:
    """Write one line; lines of several replicas do not mix."""
    words = [part if isinstance(part, str) else str(values[part]) for part in parts]
    sys.stdout.write(f"{who}{sep.join(words)}\n")
    sys.stdout.flush()
