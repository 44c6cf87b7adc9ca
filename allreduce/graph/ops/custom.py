"""Operators that users add: a row of the table like any other."""

from __future__ import annotations

from typing import Any, Protocol

from allreduce.errors import UsageError
from allreduce.graph.ops.base import Gradient, Kernel, Op, ShapeRule, names, register
from allreduce.graph.scope import users_line
from allreduce.graph.tensor import Tensor
from allreduce.graph.trace import apply


class Operator(Protocol):
    """What `register_op` returns."""

    def __call__(self, *inputs: Any, **attrs: Any) -> Tensor:
        """Record the operator, or run it at once outside of `ar.function`."""


def register_op(
    name: str, *, shape: ShapeRule, cpu: Kernel, gradient: Gradient | None = None
) -> Operator:
    """Add an operator; returns the function that applies it to tensors, arrays and numbers.

    Args:
        name: What a printed graph calls it; no other operator's.
        shape: `(specs, attrs) -> spec`: from the inputs' `spec.shape` and `spec.dtype` to the
            output's. `specs[0]` is an output like the first input.
        cpu: `(out, inputs, attrs)`: writes the value into `out`, a C-contiguous array of the shape
            rule's shape and dtype that overlaps no input. Inputs may be strided.
        gradient: `(dy, y, inputs, attrs) -> gradients`: one for each input, or None where it has
            none, written with `ar.ops`. `dy` is the gradient of the output `y`.

    Raises:
        UsageError: The name is taken, or an argument is not what it has to be.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"{users_line()}: an operator's name is an identifier, not {name!r}")
    if name in names():
        raise UsageError(
            f"{users_line()}: there is an operator {name!r} already; choose another name"
        )
    for what, part in (("shape", shape), ("cpu", cpu), ("gradient", gradient)):
        if not callable(part) and not (what == "gradient" and part is None):
            raise UsageError(
                f"{users_line()}: operator {name!r}: {what} is a function, not {part!r:.60}"
            )
    register(Op(name, shape, cpu, gradient))

    def operator(*inputs: Any, **attrs: Any) -> Tensor:
        return apply(name, *inputs, **attrs)

    operator.__name__ = operator.__qualname__ = name
    return operator
