"""Softmax and its logarithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.errors import ShapeError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axis
from allreduce.graph.ops.common import as_floats, floats_only, same_spec, swap_axes, through_float32
from allreduce.graph.trace.dispatch import apply, node_of


def softmax(x: Any, axis: int = -1) -> Tensor:
    """Turn numbers into shares that add up to 1 along an axis."""
    return _along("softmax", x, axis)


def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """Take the logarithm of softmax without rounding small shares to 0."""
    return _along("log_softmax", x, axis)


def logits_of(x: Any) -> Tensor | None:
    """Return the input of the softmax over the last axis that made this tensor, or None.

    A cross-entropy then uses the stable, fused kernel.
    """
    node = node_of(x)
    return x.trace.tensor(node.inputs[0]) if node is not None and node.op == "softmax" else None


def _along(name: str, x: Any, axis: int) -> Tensor:
    """Apply a row, which works along the last axis, along another."""
    tensor = as_floats(x)
    if not tensor.ndim:
        raise ShapeError(f"{users_line()}: {name} needs an axis, got a scalar")
    at = as_axis(name, tensor, axis)
    last = tensor.ndim - 1
    return swap_axes(apply(name, swap_axes(tensor, at, last)), at, last)


@through_float32
def _softmax(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    if out.size:
        _native.run_rows("softmax", out, inputs)


def _log_softmax(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    (x,) = inputs
    if out.size:
        # Less the largest, so that no exponential overflows.
        np.subtract(x, np.maximum.reduce(x, axis=-1, keepdims=True), out=out)
        total = np.add.reduce(np.exp(out), axis=-1, keepdims=True)
        np.subtract(out, np.log(total, out=total), out=out)


def _row_sum(x: Tensor) -> Tensor:
    return apply("sum", x, axes=(x.ndim - 1,), keepdims=True)


register(
    "softmax",
    floats_only(same_spec),
    _softmax,
    lambda dy, y, x, attrs: [y * (dy - _row_sum(dy * y))],
)
register(
    "log_softmax",
    floats_only(same_spec),
    _log_softmax,
    lambda dy, y, x, attrs: [dy - apply("exp", y) * _row_sum(dy)],
)
