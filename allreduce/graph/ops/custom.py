"""Operators that users add: a row of the table like any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.op_table import Attrs, Gradient, Kernel, ShapeRule, names, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Spec, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_dtype, as_shape
from allreduce.graph.ops.common import cast
from allreduce.graph.trace.dispatch import apply, as_tensor
from allreduce.keywords import explain


class Operator(Protocol):
    """An operator that `register_op` returned."""

    def __call__(self, *inputs: Any, **attrs: Any) -> Tensor:
        """Record the operator, or run it at once outside of `ar.function`."""


@explain()
def register_op(
    name: str,
    *,
    shape: ShapeRule,
    cpu: Kernel,
    cuda: Kernel | None = None,
    gradient: Gradient | None = None,
) -> Operator:
    """Add an operator; returns the function that applies it to tensors, arrays and numbers.

    Args:
        name: Its unique name, as in printed graphs.
        shape: `(specs, attrs) -> spec`: from the inputs' `spec.shape` and `spec.dtype` to the
            output's. `specs[0]` is an output like the first input.
        cpu: `(out, inputs, attrs)`: writes the value into `out`, a C-contiguous array of the shape
            rule's shape and dtype that overlaps no input. It must not write to its inputs, which
            may be strided, and may be arrays of your program. It returns nothing, or `out`. Its
            value must depend on inputs and attributes only: equal calls are computed once, and
            calls on constants once for all steps. It draws no random numbers.
        cuda: The same on CuPy arrays. The operator is placed on GPUs only if it has one. It
            enqueues work on CuPy's current stream, and does not wait for it. It is also called once
            on zeros before the first step of each batch size.
        gradient: `(dy, y, inputs, attrs) -> gradients`: one for each input, of its shape, or None
            where it has none, written with `ar.ops`. `dy` is the gradient of the output `y`.

    Raises:
        UsageError: The name is taken, or an argument is invalid.
    """
    _check(name, {"shape": shape, "cpu": cpu, "cuda": cuda, "gradient": gradient})
    label = f"operator {name!r}"
    register(
        name,
        _checked_shape(label, shape),
        _checked_kernel(label, cpu),
        None if gradient is None else _checked_gradient(label, gradient),
        cuda=None if cuda is None else _checked_kernel(label, cuda),
        users=True,
    )

    @explain()
    def operator(*inputs: Any, **attrs: Any) -> Tensor:
        return apply(name, *inputs, **attrs)

    operator.__name__ = operator.__qualname__ = name
    return operator


def _check(name: str, parts: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"{users_line()}: an operator's name is an identifier, not {name!r}")
    if name in names():
        raise UsageError(
            f"{users_line()}: there is an operator {name!r} already; choose another name"
        )
    for what, part in parts.items():
        left_out = part is None and what in ("cuda", "gradient")
        if not callable(part) and not left_out:
            raise UsageError(
                f"{users_line()}: operator {name!r}: {what} is a function, not {part!r:.60}"
            )


@contextmanager
def _named(label: str, what: str) -> Iterator[None]:
    """Have errors of a user's function say of which operator it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the {what} of {label}")
        raise


def _checked_shape(label: str, shape: ShapeRule) -> ShapeRule:
    def rule(specs: Sequence[Spec], attrs: Attrs) -> Spec:
        with _named(label, "shape rule"):
            found: Any = shape(specs, attrs)
        if not isinstance(found, Spec):
            raise UsageError(
                f"the shape rule of {label} gave {found!r:.60}; it returns a spec, such as "
                "specs[0] or type(specs[0])(shape, dtype)"
            )
        return _normal(label, found)

    return rule


def _normal(label: str, found: Spec) -> Spec:
    """Give a spec sizes and a dtype of our own kinds in place of NumPy's integers and names."""
    what = f"the shape rule of {label}"
    if not isinstance(found.shape, tuple | list):
        raise UsageError(f"{what} gave the shape {found.shape!r:.60}; it is a tuple of sizes")
    return Spec(as_shape(what, tuple(found.shape)), as_dtype(found.dtype))


def _checked_kernel(label: str, users: Kernel) -> Kernel:
    def kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
        with _named(label, "kernel"):
            found = users(out, inputs, attrs)
        if found is not None and found is not out:
            raise UsageError(
                f"the kernel of {label} returned a {type(found).__name__} instead of writing its "
                "value into out: out[...] = …, or np.add(a, b, out=out)"
            )

    return kernel


def _checked_gradient(label: str, gradient: Gradient) -> Gradient:
    def checked(dy: Any, y: Any, inputs: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
        with _named(label, "gradient"):
            found: Any = gradient(dy, y, inputs, attrs)
        if not isinstance(found, list | tuple) or len(found) != len(inputs):
            raise UsageError(
                f"the gradient of {label} gave {found!r:.60}; it returns a list with one gradient "
                f"for each of {len(inputs)} inputs, or None"
            )
        parts = enumerate(zip(found, inputs, strict=True))
        return [None if part is None else _part(label, i, part, x) for i, (part, x) in parts]

    return checked


def _part(label: str, place: int, part: Any, x: Tensor) -> Tensor:
    """Check the gradient of one input, and cast it to the input's dtype."""
    with _named(label, "gradient"):
        tensor = as_tensor(part)
    if tensor.shape != x.shape:
        raise ShapeError(
            f"the gradient of {label} gave {show(tensor.shape)} for input {place}, whose shape is "
            f"{show(x.shape)}; ar.ops.sum_to undoes a broadcast"
        )
    return cast(tensor, x.dtype)
