"""Comparison, logic, bits, and choice by a condition, whose gradient goes to the chosen operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.graph.core.op_table import Attrs, Op, register
from allreduce.graph.core.spec import Spec, broadcast
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.common import (
    cast,
    elementwise,
    promote,
    promote_together,
    split,
    unbroadcast,
)
from allreduce.graph.trace.dispatch import apply


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


def logical_xor(a: Any, b: Any) -> Tensor:
    """Tell where one is true (not zero) and the other is not."""
    return apply("logical_xor", *promote(np.logical_xor, a, b))


def logical_not(x: Any) -> Tensor:
    """Tell where `x` is false (zero)."""
    return apply("logical_not", *promote(np.logical_not, x))


def isfinite(x: Any) -> Tensor:
    """Tell where `x` is neither infinite nor NaN."""
    return apply("isfinite", *promote(np.isfinite, x))


def isnan(x: Any) -> Tensor:
    """Tell where `x` is NaN."""
    return apply("isnan", *promote(np.isnan, x))


def isinf(x: Any) -> Tensor:
    """Tell where `x` is infinite."""
    return apply("isinf", *promote(np.isinf, x))


def bitwise_and(a: Any, b: Any) -> Tensor:
    """Take the bits that both have: of integers, or of booleans, which are one each."""
    return apply("bitwise_and", *promote(np.bitwise_and, a, b))


def bitwise_or(a: Any, b: Any) -> Tensor:
    """Take the bits that at least one has, of integers or booleans."""
    return apply("bitwise_or", *promote(np.bitwise_or, a, b))


def bitwise_xor(a: Any, b: Any) -> Tensor:
    """Take the bits that one has and the other has not, of integers or booleans."""
    return apply("bitwise_xor", *promote(np.bitwise_xor, a, b))


def invert(x: Any) -> Tensor:
    """Take the bits that `x`, of integers or booleans, has not."""
    return apply("invert", *promote(np.invert, x))


for _ufunc in (
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
    np.equal,
    np.not_equal,
    np.logical_and,
    np.logical_or,
    np.logical_xor,
    np.logical_not,
    np.isfinite,
    np.isnan,
    np.isinf,
    np.bitwise_and,
    np.bitwise_or,
    np.bitwise_xor,
    np.invert,
):
    elementwise(_ufunc)


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Take `a` where the condition is true and `b` elsewhere."""
    return apply("where", cast(condition, np.bool_), *promote_together(a, b))


def _where_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    return Spec(broadcast([spec.shape for spec in specs]), specs[1].dtype)


def _where(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    condition, a, b = inputs
    np.copyto(out, b)
    np.copyto(out, a, where=condition)


def _where_gradient(
    dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs
) -> list[Tensor | None]:
    kept, dropped = split(x[0], dy)
    return [None, unbroadcast(kept, x[1]), unbroadcast(dropped, x[2])]


register(Op("where", _where_shape, _where, _where_gradient, elementwise=True))
