"""Scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from allreduce.devices.integers import switch
from allreduce.errors import ShapeError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import broadcasts_to, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.common import promote_together, swap_axes
from allreduce.graph.ops.math.comparison import logical_and, where
from allreduce.graph.ops.math.elementwise import maximum
from allreduce.graph.ops.math.matmul import matmul
from allreduce.graph.ops.nn.dropout import dropout as drop
from allreduce.graph.ops.nn.softmax import softmax
from allreduce.graph.trace.dispatch import as_tensor


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, mask: Any = None, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Average the values, each query by how well the keys fit it.

    Source: Vaswani et al., "Attention is all you need" (2017), section 3.2.1.

    Args:
        query: `(…, queries, features)`; leading axes, such as batch and heads, broadcast.
        key: `(…, keys, features)`.
        value: `(…, keys, values)`.
        mask: Booleans that broadcast to `(…, queries, keys)`: which keys a query may look at. One
            that may look at none, as both mask and `causal` say, gets the mean of all.
        causal: Whether a query looks at keys up to its own place only, counted from the start.
        dropout: The share of the weights that are dropped.

    Returns:
        `(…, queries, values)`.

    Raises:
        ShapeError: The features, or the numbers of keys and values, differ; or the mask does not
            fit.
    """
    q, k, v = promote_together(query, key, value)
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShapeError(
            f"{users_line()}: attention takes queries (…, n, d), keys (…, m, d) and values "
            f"(…, m, e), not {show(q.shape)}, {show(k.shape)} and {show(v.shape)}"
        )
    features = q.shape[-1]
    if not isinstance(features, int) or not features:
        raise ShapeError(f"{users_line()}: attention needs features, got queries {show(q.shape)}")
    scores = matmul(q * (features**-0.5), swap_axes(k, k.ndim - 2, k.ndim - 1))
    masks = [] if mask is None else [as_tensor(mask)]
    if switch("attention: causal", causal):
        masks.append(as_tensor(_lower(scores)))
    if masks:
        scores = _masked(scores, masks)
    return matmul(drop(softmax(scores), dropout), v)


def _lower(scores: Tensor) -> np.ndarray:
    queries, keys = scores.shape[-2:]
    if not isinstance(queries, int) or not isinstance(keys, int):
        raise ShapeError(
            f"{users_line()}: causal attention needs known numbers of queries and keys, not "
            f"{show((queries, keys))}"
        )
    return np.tri(queries, keys, dtype=bool)


def _check_fits(mask: Tensor, scores: Tensor) -> None:
    if not broadcasts_to(mask.shape, scores.shape):
        raise ShapeError(
            f"{users_line()}: the mask of an attention has shape {show(mask.shape)}, which does "
            f"not broadcast to (…, queries, keys): {show(scores.shape)} here"
        )


def _masked(scores: Tensor, masks: Sequence[Tensor]) -> Tensor:
    for mask in masks:
        if mask.dtype != bool:
            raise ShapeError(f"{users_line()}: a mask holds booleans, not {mask.dtype}")
        _check_fits(mask, scores)
    # The lowest number instead of an infinity: rows without any key stay numbers. A score that has
    # overflowed to -inf is still above it.
    lowest = float(np.finfo(scores.dtype).min)
    return where(reduce(logical_and, masks), maximum(scores, lowest / 2), lowest)
