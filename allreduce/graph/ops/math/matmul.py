"""The matrix product. Its gradients read transposed views, so that BLAS sees no copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.errors import ShapeError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Dim, Shape, Spec, broadcast, show, size_of
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.common import promote_together, reshaped, swap_axes, unbroadcast
from allreduce.graph.trace.dispatch import apply, node_of


def matmul(a: Any, b: Any) -> Tensor:
    """Multiply matrices.

    Args:
        a: `(…, n, k)`; leading axes broadcast. A vector `(k,)` counts as one row.
        b: `(…, k, m)`. A vector `(k,)` counts as one column.

    Returns:
        `(…, n, m)`, without the axis that a vector lacks.

    Raises:
        ShapeError: The inner sizes differ, or an operand is a scalar.
    """
    left, right = promote_together(a, b)
    if not left.ndim or not right.ndim:
        raise ShapeError(
            f"{users_line()}: matmul of {show(left.shape)} and {show(right.shape)}: "
            "a scalar is no matrix; multiply by it with *"
        )
    try:  # before vectors become matrices, so that errors show the original shapes
        _check_inner(left.shape, right.shape)
    except ShapeError as error:
        raise ShapeError(f"{users_line()}: matmul: {error}") from None
    if left.ndim == 1:
        product = matmul(reshaped(left, (1, *left.shape)), right)
        tail = product.shape[-1:] if right.ndim > 1 else ()
        return reshaped(product, (*product.shape[: max(right.ndim - 2, 0)], *tail))
    if right.ndim == 1:
        product = matmul(left, reshaped(right, (*right.shape, 1)))
        return reshaped(product, product.shape[:-1])
    if left.ndim > 2 and right.ndim == 2 and _has_rows(left):
        # One large product instead of many small ones, in the gradients too.
        rows = size_of(left.shape[:-1])  # not -1: they are there also where nothing is in them
        flat = apply("matmul", reshaped(left, (rows, left.shape[-1])), right)
        return reshaped(flat, (*left.shape[:-1], right.shape[-1]))
    return apply("matmul", left, right)


def _has_rows(x: Tensor) -> bool:
    """Whether all axes but the last have a size together: two named ones have none."""
    return sum(isinstance(size, Dim) for size in x.shape[:-1]) < 2


def _check_inner(a: Shape, b: Shape) -> None:
    inner = a[-1], b[-2] if len(b) > 1 else b[0]
    if inner[0] != inner[1]:
        raise ShapeError(
            f"shapes {show(a)} and {show(b)} do not multiply: inner sizes {inner[0]} and "
            f"{inner[1]} differ"
        )


def _matmul_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    a, b = specs
    _check_inner(a.shape, b.shape)
    leading = broadcast([a.shape[:-2], b.shape[:-2]])
    return Spec((*leading, a.shape[-2], b.shape[-1]), a.dtype)


def _matmul(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    np.matmul(inputs[0], inputs[1], out=out)


def _swapped(x: Tensor) -> Tensor:
    return swap_axes(x, x.ndim - 2, x.ndim - 1)


def _matmul_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    a, b = x
    if _is_swapped(b):
        # The array behind the view b gets its gradient in its own layout, without a copy row by
        # row: 0.2 instead of 1.6 ms for the keys of an attention, (16, 4, 64, 64).
        of_b = _swapped(apply("matmul", _swapped(dy), a))
    else:
        of_b = apply("matmul", _swapped(a), dy)
    return [unbroadcast(apply("matmul", dy, _swapped(b)), a), unbroadcast(of_b, b)]


def _is_swapped(x: Tensor) -> bool:
    """Return whether a batch of matrices is transposed, as far as the trace shows."""
    node = node_of(x)
    if x.ndim < 3 or node is None or node.op != "transpose":
        return False
    return bool(node.attrs["axes"] == (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


register("matmul", _matmul_shape, _matmul, _matmul_gradient, is_product=True)
