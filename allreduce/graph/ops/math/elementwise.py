"""Element-wise arithmetic, by NumPy's rules for broadcasting and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.graph.core.op_table import Attrs, cut, register
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_number
from allreduce.graph.ops.common import binary, cast, same_spec, split, unary, unbroadcast
from allreduce.graph.trace.dispatch import apply, as_tensor

# --- arithmetic of two operands -------------------------------------------------------------------

add = binary(np.add, "Add.", lambda dy, y, x, attrs: [unbroadcast(dy, x[0]), unbroadcast(dy, x[1])])
subtract = binary(
    np.subtract,
    "Subtract `b` from `a`.",
    lambda dy, y, x, attrs: [unbroadcast(dy, x[0]), unbroadcast(-dy, x[1])],
)
multiply = binary(
    np.multiply,
    "Multiply element by element.",
    lambda dy, y, x, attrs: [unbroadcast(dy * x[1], x[0]), unbroadcast(dy * x[0], x[1])],
)


def _divide_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    by_a = dy / x[1]
    return [unbroadcast(by_a, x[0]), unbroadcast(-by_a * y, x[1])]


divide = binary(np.divide, "Divide; integers give floats.", _divide_gradient)
floor_divide = binary(np.floor_divide, "Divide and round down to a whole number.", cut)
remainder = binary(
    np.remainder,
    "Give what `floor_divide` leaves: 0, or of the sign of `b`.",
    lambda dy, y, x, attrs: [unbroadcast(dy, x[0]), unbroadcast(-dy * (x[0] // x[1]), x[1])],
)


def _power_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    a, b = x
    # 0⁰ and log 0 stand where the derivative is 0; computing them there would give 0·∞.
    zero, one = as_tensor(0, y.dtype), as_tensor(1, y.dtype)
    lower = power(a, apply("where", b == 0, one, b - 1))
    by_b = apply("where", a == 0, zero, y * log(apply("where", a == 0, one, a)))
    return [unbroadcast(dy * b * lower, a), unbroadcast(dy * by_b, b)]


_power = binary(np.power, "Raise `a` to the power `b`.", _power_gradient)


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
    return _power(a, b)


def _chosen(dy: Tensor, first: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
    kept, dropped = split(first, dy)
    return [unbroadcast(kept, x[0]), unbroadcast(dropped, x[1])]


maximum = binary(
    np.maximum,
    "Take the larger of two; where they are equal the gradient goes to `a`.",
    lambda dy, y, x, attrs: _chosen(dy, x[0] >= x[1], x),
)
minimum = binary(
    np.minimum,
    "Take the smaller of two; where they are equal the gradient goes to `a`.",
    lambda dy, y, x, attrs: _chosen(dy, x[0] <= x[1], x),
)

# --- functions of one operand ---------------------------------------------------------------------

negative = unary(np.negative, "Change the sign.", lambda dy, y, x, attrs: [-dy])
sign = unary(np.sign, "Give -1, 0 or 1.", cut)
absolute = unary(np.absolute, "Drop the sign.", lambda dy, y, x, attrs: [dy * sign(x[0])])
floor = unary(np.floor, "Round down to a whole number.", cut)
exp = unary(np.exp, "Raise e to the power `x`.", lambda dy, y, x, attrs: [dy * y])
log = unary(np.log, "Take the natural logarithm.", lambda dy, y, x, attrs: [dy / x[0]])
log1p = unary(
    np.log1p,
    "Take the natural logarithm of 1 + `x`, exact near 0.",
    lambda dy, y, x, attrs: [dy / (x[0] + 1)],
)
expm1 = unary(
    np.expm1,
    "Raise e to the power `x` and subtract 1, exact near 0.",
    lambda dy, y, x, attrs: [dy * (y + 1)],
)
sin = unary(np.sin, "Take the sine of radians.", lambda dy, y, x, attrs: [dy * apply("cos", x[0])])
cos = unary(np.cos, "Take the cosine of radians.", lambda dy, y, x, attrs: [-dy * sin(x[0])])
sqrt = unary(np.sqrt, "Take the square root.", lambda dy, y, x, attrs: [dy * 0.5 / y])
square = unary(np.square, "Multiply by itself.", lambda dy, y, x, attrs: [dy * (x[0] * 2)])


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


register("clip", same_spec, _clip, _clip_gradient, elementwise=True, in_place=True)
