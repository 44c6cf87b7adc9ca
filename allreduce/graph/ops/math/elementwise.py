"""Element-wise arithmetic, by NumPy's rules for broadcasting and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.graph.core.op_table import Attrs, Op, cut, register
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_number
from allreduce.graph.ops.common import (
    cast,
    elementwise,
    promote,
    same_spec,
    split,
    unbroadcast,
)
from allreduce.graph.trace.dispatch import apply, as_tensor

# --- arithmetic of two operands -------------------------------------------------------------------


def add(a: Any, b: Any) -> Tensor:
    """Add."""
    return apply("add", *promote(np.add, a, b))


elementwise(np.add, lambda dy, y, x, attrs: [unbroadcast(dy, x[0]), unbroadcast(dy, x[1])])


def subtract(a: Any, b: Any) -> Tensor:
    """Subtract `b` from `a`."""
    return apply("subtract", *promote(np.subtract, a, b))


elementwise(np.subtract, lambda dy, y, x, attrs: [unbroadcast(dy, x[0]), unbroadcast(-dy, x[1])])


def multiply(a: Any, b: Any) -> Tensor:
    """Multiply element by element."""
    return apply("multiply", *promote(np.multiply, a, b))


elementwise(
    np.multiply,
    lambda dy, y, x, attrs: [unbroadcast(dy * x[1], x[0]), unbroadcast(dy * x[0], x[1])],
)


def divide(a: Any, b: Any) -> Tensor:
    """Divide; integers give floats."""
    return apply("divide", *promote(np.divide, a, b))


def _divide_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    by_a = dy / x[1]
    return [unbroadcast(by_a, x[0]), unbroadcast(-by_a * y, x[1])]


elementwise(np.divide, _divide_gradient)


def floor_divide(a: Any, b: Any) -> Tensor:
    """Divide and round down to a whole number."""
    return apply("floor_divide", *promote(np.floor_divide, a, b))


elementwise(np.floor_divide, cut)


def remainder(a: Any, b: Any) -> Tensor:
    """Return the remainder of `floor_divide`: 0, or of the sign of `b`."""
    return apply("remainder", *promote(np.remainder, a, b))


elementwise(
    np.remainder,
    lambda dy, y, x, attrs: [unbroadcast(dy, x[0]), unbroadcast(-dy * (x[0] // x[1]), x[1])],
)


def power(a: Any, b: Any) -> Tensor:
    """Raise `a` to the power `b`."""
    if type(b) in (int, float) and type(a) not in (int, float):
        a = as_tensor(a)
    if isinstance(a, Tensor) and type(b) in (int, float) and a.dtype.kind == "f":
        if b == 1:
            return a
        if b == 2:
            return square(a)
        if b == 0.5:
            return sqrt(a)
    return apply("power", *promote(np.power, a, b))


def _power_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    a, b = x
    # 0⁰ and log 0 stand where the derivative is 0; computing them there would give 0·∞.
    zero, one = as_tensor(0, y.dtype), as_tensor(1, y.dtype)
    lower = power(a, apply("where", b == 0, one, b - 1))
    by_b = apply("where", a == 0, zero, y * log(apply("where", a == 0, one, a)))
    return [unbroadcast(dy * b * lower, a), unbroadcast(dy * by_b, b)]


elementwise(np.power, _power_gradient)


def maximum(a: Any, b: Any) -> Tensor:
    """Take the larger of two; where they are equal the gradient goes to `a`."""
    return apply("maximum", *promote(np.maximum, a, b))


def minimum(a: Any, b: Any) -> Tensor:
    """Take the smaller of two; where they are equal the gradient goes to `a`."""
    return apply("minimum", *promote(np.minimum, a, b))


def _chosen(dy: Tensor, first: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
    kept, dropped = split(first, dy)
    return [unbroadcast(kept, x[0]), unbroadcast(dropped, x[1])]


elementwise(np.maximum, lambda dy, y, x, attrs: _chosen(dy, x[0] >= x[1], x))
elementwise(np.minimum, lambda dy, y, x, attrs: _chosen(dy, x[0] <= x[1], x))


# --- functions of one operand ---------------------------------------------------------------------


def negative(x: Any) -> Tensor:
    """Change the sign."""
    return apply("negative", *promote(np.negative, x))


elementwise(np.negative, lambda dy, y, x, attrs: [-dy])


def absolute(x: Any) -> Tensor:
    """Drop the sign."""
    return apply("absolute", *promote(np.absolute, x))


elementwise(np.absolute, lambda dy, y, x, attrs: [dy * sign(x[0])])


def sign(x: Any) -> Tensor:
    """Give -1, 0 or 1."""
    return apply("sign", *promote(np.sign, x))


elementwise(np.sign, cut)


def floor(x: Any) -> Tensor:
    """Round down to a whole number."""
    return apply("floor", *promote(np.floor, x))


elementwise(np.floor, cut)


def exp(x: Any) -> Tensor:
    """Raise e to the power `x`."""
    return apply("exp", *promote(np.exp, x))


elementwise(np.exp, lambda dy, y, x, attrs: [dy * y])


def log(x: Any) -> Tensor:
    """Take the natural logarithm."""
    return apply("log", *promote(np.log, x))


elementwise(np.log, lambda dy, y, x, attrs: [dy / x[0]])


def log1p(x: Any) -> Tensor:
    """Take the natural logarithm of 1 + `x`, exact near 0."""
    return apply("log1p", *promote(np.log1p, x))


elementwise(np.log1p, lambda dy, y, x, attrs: [dy / (x[0] + 1)])


def expm1(x: Any) -> Tensor:
    """Raise e to the power `x` and subtract 1, exact near 0."""
    return apply("expm1", *promote(np.expm1, x))


elementwise(np.expm1, lambda dy, y, x, attrs: [dy * (y + 1)])


def sin(x: Any) -> Tensor:
    """Take the sine of radians."""
    return apply("sin", *promote(np.sin, x))


elementwise(np.sin, lambda dy, y, x, attrs: [dy * cos(x[0])])


def cos(x: Any) -> Tensor:
    """Take the cosine of radians."""
    return apply("cos", *promote(np.cos, x))


elementwise(np.cos, lambda dy, y, x, attrs: [-dy * sin(x[0])])


def sqrt(x: Any) -> Tensor:
    """Take the square root."""
    return apply("sqrt", *promote(np.sqrt, x))


elementwise(np.sqrt, lambda dy, y, x, attrs: [dy * 0.5 / y])


def square(x: Any) -> Tensor:
    """Multiply by itself."""
    return apply("square", *promote(np.square, x))


elementwise(np.square, lambda dy, y, x, attrs: [dy * (x[0] * 2)])


def clip(x: Any, low: float, high: float) -> Tensor:
    """Limit to `low`…`high`, two Python numbers; no gradient flows where it was outside."""
    tensor = as_tensor(x)
    as_number("a bound of clip", low)
    as_number("a bound of clip", high)
    return apply("clip", cast(tensor, np.result_type(tensor.dtype, low, high)), low=low, high=high)


def _clip(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    np.clip(inputs[0], attrs["low"], attrs["high"], out=out)


def _clip_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    inside = apply("logical_and", x[0] >= attrs["low"], x[0] <= attrs["high"])
    return [split(inside, dy)[0]]


register(Op("clip", same_spec, _clip, _clip_gradient, elementwise=True, in_place=True))
