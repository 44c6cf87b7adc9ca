"""Comparison, logic, bits, and choice by a condition, whose gradient goes to the chosen operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.spec import Spec, broadcast
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.common import binary, cast, promote_together, split, unary, unbroadcast
from allreduce.graph.trace.dispatch import apply

less = binary(np.less, "Tell where `a < b`.")
less_equal = binary(np.less_equal, "Tell where `a <= b`.")
greater = binary(np.greater, "Tell where `a > b`.")
greater_equal = binary(np.greater_equal, "Tell where `a >= b`.")
equal = binary(np.equal, "Tell where `a == b`.")
not_equal = binary(np.not_equal, "Tell where `a != b`.")
logical_and = binary(np.logical_and, "Tell where both are true (not zero).")
logical_or = binary(np.logical_or, "Tell where at least one is true (not zero).")
logical_xor = binary(np.logical_xor, "Tell where one is true (not zero) and the other is not.")
logical_not = unary(np.logical_not, "Tell where `x` is false (zero).")
isfinite = unary(np.isfinite, "Tell where `x` is neither infinite nor NaN.")
isnan = unary(np.isnan, "Tell where `x` is NaN.")
isinf = unary(np.isinf, "Tell where `x` is infinite.")
bitwise_and = binary(
    np.bitwise_and, "Take the bits that both have: of integers, or of booleans, which are one each."
)
bitwise_or = binary(np.bitwise_or, "Take the bits that at least one has, of integers or booleans.")
bitwise_xor = binary(
    np.bitwise_xor, "Take the bits that one has and the other has not, of integers or booleans."
)
invert = unary(np.invert, "Take the bits that `x`, of integers or booleans, has not.")


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


register("where", _where_shape, _where, _where_gradient, elementwise=True)
