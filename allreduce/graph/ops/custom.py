"""Operators that users add: a row of the table like any other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from allreduce.errors import UsageError
from allreduce.graph.ops.base import Attrs, Gradient, Kernel, Op, ShapeRule, names, register
from allreduce.graph.scope import users_line
from allreduce.graph.spec import Spec
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
            rule's shape and dtype that overlaps no input. Inputs may be strided. It returns
            nothing, or `out`.
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
    told = f"operator {name!r}"
    register(
        Op(
            name,
            _checked_shape(told, shape),
            _checked_kernel(told, cpu),
            None if gradient is None else _checked_gradient(told, gradient),
        )
    )

    def operator(*inputs: Any, **attrs: Any) -> Tensor:
        return apply(name, *inputs, **attrs)

    operator.__name__ = operator.__qualname__ = name
    return operator


@contextmanager
def _named(told: str, what: str) -> Iterator[None]:
    """Have errors of a user's function say of which operator it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the {what} of {told}")
        raise


def _checked_shape(told: str, shape: ShapeRule) -> ShapeRule:
    def rule(specs: Sequence[Spec], attrs: Attrs) -> Spec:
        with _named(told, "shape rule"):
            found: Any = shape(specs, attrs)
        if not isinstance(found, Spec):
            raise UsageError(
                f"the shape rule of {told} gave {found!r:.60}; it returns a spec, such as specs[0] "
                "or type(specs[0])(shape, dtype)"
            )
        return found

    return rule


def _checked_kernel(told: str, cpu: Kernel) -> Kernel:
    def kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
        with _named(told, "kernel"):
            found = cpu(out, inputs, attrs)
        if found is not None and found is not out:
            raise UsageError(
                f"the kernel of {told} returned a {type(found).__name__} instead of writing its "
                "value into out: out[...] = …, or np.add(a, b, out=out)"
            )

    return kernel


def _checked_gradient(told: str, gradient: Gradient) -> Gradient:
    def checked(dy: Any, y: Any, inputs: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
        with _named(told, "gradient"):
            found: Any = gradient(dy, y, inputs, attrs)
        if not isinstance(found, list | tuple) or len(found) != len(inputs):
            raise UsageError(
                f"the gradient of {told} gave {found!r:.60}; it returns a list with one gradient "
                f"for each of {len(inputs)} inputs, or None"
            )
        return found

    return checked
