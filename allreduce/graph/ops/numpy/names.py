"""Map NumPy's functions to operators: `np.exp(tensor)` is `ar.ops.exp(tensor)`.

The functions here, and in `shapes.py`, take the arguments that the operator supports, under NumPy's
names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.errors import UsageError
from allreduce.graph.core.numpy_calls import OPERATOR_OF
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Shape
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axes
from allreduce.graph.ops.array import gather, indexing
from allreduce.graph.ops.array import shape as shapes
from allreduce.graph.ops.common import cast
from allreduce.graph.ops.math import comparison, cumulative, elementwise, matmul, reduce
from allreduce.graph.ops.nn import activation
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.trace import current_trace

Axes = int | Sequence[int] | None

# Ufuncs, whose operators have the same name, and take the same.
for _home, _names in (
    (
        elementwise,
        (
            *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "negative"),
            *("floor_divide", "remainder"),
            *("absolute", "sign", "floor", "exp", "expm1", "log", "log1p", "sqrt", "square"),
            *("sin", "cos"),
        ),
    ),
    (activation, ("tanh",)),
    (
        comparison,
        (
            *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
            *("isfinite", "isnan", "isinf"),
            *("logical_and", "logical_or", "logical_xor", "logical_not"),
            *("bitwise_and", "bitwise_or", "bitwise_xor", "invert"),
        ),
    ),
    (matmul, ("matmul",)),
):
    for _name in _names:
        OPERATOR_OF[getattr(np, _name)] = getattr(_home, _name)


def stands_for(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
    """Have the function that follows stand for some of NumPy's."""

    def enter(operator: Callable[..., Any]) -> None:
        OPERATOR_OF.update(dict.fromkeys(functions, operator))

    return enter


@stands_for(np.sum)
def _sum(a: Any, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    return reduce.sum(a, axis, keepdims)


@stands_for(np.mean)
def _mean(a: Any, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    return reduce.mean(a, axis, keepdims)


@stands_for(np.max, np.amax)
def _max(a: Any, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    return reduce.max(a, axis, keepdims)


@stands_for(np.min, np.amin)
def _min(a: Any, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    return reduce.min(a, axis, keepdims)


@stands_for(np.argmax)
def _argmax(a: Any, axis: int | None = None) -> Tensor:
    return indexing.argmax(shapes.reshape(a, -1) if axis is None else a, axis or 0)


@stands_for(np.argmin)
def _argmin(a: Any, axis: int | None = None) -> Tensor:
    return indexing.argmin(shapes.reshape(a, -1) if axis is None else a, axis or 0)


@stands_for(np.var)
def _var(a: Any, axis: Axes = None, *, ddof: int = 0, keepdims: bool = False) -> Tensor:
    return reduce.var(a, axis, keepdims, ddof)


@stands_for(np.std)
def _std(a: Any, axis: Axes = None, *, ddof: int = 0, keepdims: bool = False) -> Tensor:
    return reduce.std(a, axis, keepdims, ddof)


@stands_for(np.cumsum)
def _cumsum(a: Any, axis: int | None = None) -> Tensor:
    return cumulative.cumsum(a, axis)


@stands_for(np.take)
def _take(a: Any, indices: Any, axis: int | None = None) -> Tensor:
    return gather.take(shapes.reshape(a, -1) if axis is None else a, indices, axis or 0)


@stands_for(np.take_along_axis)
def _take_along_axis(arr: Any, indices: Any, axis: int = -1) -> Tensor:
    return gather.take_along_axis(arr, indices, axis)


@stands_for(np.clip)
def _clip(a: Any, a_min: float, a_max: float) -> Tensor:
    return elementwise.clip(a, a_min, a_max)


@stands_for(np.where)
def _where(condition: Any, x: Any, y: Any) -> Tensor:
    return comparison.where(condition, x, y)


@stands_for(np.zeros_like)
def _zeros_like(a: Any) -> Tensor:
    return shapes.zeros_like(a)


@stands_for(np.ones_like)
def _ones_like(a: Any) -> Tensor:
    return shapes.ones_like(a)


@stands_for(np.full_like)
def _full_like(a: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    tensor = as_tensor(a)
    kind = tensor.dtype if dtype is None else dtype
    if isinstance(fill_value, int | float):
        return shapes.full(tensor.shape, fill_value, kind)
    return shapes.broadcast_to(fill_value, tensor.shape, kind)


@stands_for(*[np.astype] if hasattr(np, "astype") else [])  # from NumPy 2.1 on
def _astype(x: Any, dtype: Any) -> Tensor:
    return cast(x, dtype)


@stands_for(np.copy)
def _copy(a: Any) -> Tensor:
    if current_trace() is None:
        raise UsageError(f"{users_line()}: np.copy of a value makes an array, to be written to")
    return as_tensor(a)


@stands_for(np.shape)
def _shape(a: Any) -> Shape:
    return as_tensor(a).shape


@stands_for(np.ndim)
def _ndim(a: Any) -> int:
    return as_tensor(a).ndim


@stands_for(np.size)
def _size(a: Any, axis: Axes = None) -> Tensor | int:
    tensor = as_tensor(a)
    axes = as_axes("np.size", tensor, axis)
    known = [size for each in axes if isinstance(size := tensor.shape[each], int)]
    return math.prod(known) if len(known) == len(axes) else shapes.size(tensor, axes)
