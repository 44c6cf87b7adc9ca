"""Element-wise arithmetic, comparison and logic, by NumPy's rules for broadcasting and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.graph.ops.base import Attrs, Op, cut, register
from allreduce.graph.ops.common import (
    cast,
    elementwise,
    promote,
    promote_together,
    same_spec,
    unbroadcast,
)
from allreduce.graph.spec import Spec, broadcast
from allreduce.graph.tensor import Tensor
from allreduce.graph.trace import apply, as_tensor


def _zero(like: Tensor) -> Tensor:
    return as_tensor(0, like.dtype)


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
    lower = power(a, where(equal(b, 0), 1, b - 1))
    by_b = where(equal(a, 0), 0, y * log(where(equal(a, 0), 1, a)))
    return [unbroadcast(dy * b * lower, a), unbroadcast(dy * by_b, b)]


elementwise(np.power, _power_gradient)


def maximum(a: Any, b: Any) -> Tensor:
    """Take the larger of two; where they are equal the gradient goes to `a`."""
    return apply("maximum", *promote(np.maximum, a, b))


def minimum(a: Any, b: Any) -> Tensor:
    """Take the smaller of two; where they are equal the gradient goes to `a`."""
    return apply("minimum", *promote(np.minimum, a, b))


def _chosen(dy: Tensor, first: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
    zero = _zero(dy)
    return [
        unbroadcast(apply("where", first, dy, zero), x[0]),
        unbroadcast(apply("where", first, zero, dy), x[1]),
    ]


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
    return apply("clip", cast(tensor, np.result_type(tensor.dtype, low, high)), low=low, high=high)


def _clip(out: Any, inputs: Sequence[np.ndarray], attrs: Attrs) -> np.ndarray:
    return np.clip(inputs[0], attrs["low"], attrs["high"], out=out)


def _clip_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    inside = logical_and(x[0] >= attrs["low"], x[0] <= attrs["high"])
    return [apply("where", inside, dy, _zero(dy))]


register(Op("clip", same_spec, _clip, _clip_gradient))


# --- comparison and logic: no gradients, the results are booleans ---------------------------------


def less(a: Any, b: Any) -> Tensor:
    """Tell where `a < b`."""
    return apply("less", *promote(np.less, a, b))


def less_equal(a: Any, b: Any) -> Tensor:
    """Tell where `a <= b`."""
    return apply("less_equal", *promote(np.less_equal, a, b))


def greater(a: Any, b: Any) -> Tensor:
    """Tell where `a > b`."""
    return apply("greater", *promote(np.greater, a, b))


def greater_equal(a: Any, b: Any) -> Tensor:
    """Tell where `a >= b`."""
    return apply("greater_equal", *promote(np.greater_equal, a, b))


def equal(a: Any, b: Any) -> Tensor:
    """Tell where `a == b`."""
    return apply("equal", *promote(np.equal, a, b))


def not_equal(a: Any, b: Any) -> Tensor:
    """Tell where `a != b`."""
    return apply("not_equal", *promote(np.not_equal, a, b))


def logical_and(a: Any, b: Any) -> Tensor:
    """Tell where both are true (not zero)."""
    return apply("logical_and", *promote(np.logical_and, a, b))


def logical_or(a: Any, b: Any) -> Tensor:
    """Tell where at least one is true (not zero)."""
    return apply("logical_or", *promote(np.logical_or, a, b))


def logical_not(x: Any) -> Tensor:
    """Tell where `x` is false (zero)."""
    return apply("logical_not", *promote(np.logical_not, x))


def isfinite(x: Any) -> Tensor:
    """Tell where `x` is neither infinite nor NaN."""
    return apply("isfinite", *promote(np.isfinite, x))


for _ufunc in (
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
    np.equal,
    np.not_equal,
    np.logical_and,
    np.logical_or,
    np.logical_not,
    np.isfinite,
):
    elementwise(_ufunc)


# --- choice and conversion ------------------------------------------------------------------------


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Take `a` where the condition is true and `b` elsewhere."""
    return apply("where", cast(condition, np.bool_), *promote_together(a, b))


def _where_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    return Spec(broadcast([spec.shape for spec in specs]), specs[1].dtype)


def _where(out: Any, inputs: Sequence[np.ndarray], attrs: Attrs) -> np.ndarray:
    condition, a, b = inputs
    np.copyto(out, b)
    np.copyto(out, a, where=condition)
    result: np.ndarray = out
    return result


def _where_gradient(
    dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs
) -> list[Tensor | None]:
    return [None, *_chosen(dy, x[0], x[1:])]


register(Op("where", _where_shape, _where, _where_gradient))


def _cast(out: Any, inputs: Sequence[np.ndarray], attrs: Attrs) -> np.ndarray:
    np.copyto(out, inputs[0], casting="unsafe")
    result: np.ndarray = out
    return result


register(
    Op(
        "cast",
        lambda specs, attrs: Spec(specs[0].shape, attrs["dtype"]),
        _cast,
        lambda dy, y, x, attrs: [cast(dy, x[0].dtype)],
    )
)


def stop_gradient(x: Any) -> Tensor:
    """Pass the value on, and no gradient back."""
    return apply("stop_gradient", as_tensor(x))


register(Op("stop_gradient", same_spec, lambda out, inputs, attrs: inputs[0], cut, view=True))
