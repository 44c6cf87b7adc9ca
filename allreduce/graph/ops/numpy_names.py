"""Which operator stands for which of NumPy's functions: `np.exp(tensor)` is `ar.ops.exp(tensor)`.

Those that are here take what the operator knows of NumPy's arguments, under NumPy's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.errors import UsageError
from allreduce.graph.dispatch import as_tensor
from allreduce.graph.numpy_calls import OPERATOR_OF
from allreduce.graph.ops import (
    activation,
    comparison,
    cumulative,
    elementwise,
    gather,
    indexing,
    joining,
    matmul,
    reduce,
)
from allreduce.graph.ops import shape as shapes
from allreduce.graph.ops.arguments import as_axes
from allreduce.graph.scope import users_line
from allreduce.graph.spec import Shape, Size
from allreduce.graph.tensor import Tensor

Axes = int | Sequence[int] | None

# Ufuncs, whose operators have the same name, and take the same.
for _home, _names in (
    (
        elementwise,
        (
            *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "negative"),
            *("absolute", "sign", "floor", "exp", "expm1", "log", "log1p", "sqrt", "square"),
            *("sin", "cos"),
        ),
    ),
    (activation, ("tanh",)),
    (
        comparison,
        (
            *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
            *("isfinite", "logical_and", "logical_or", "logical_not"),
        ),
    ),
    (matmul, ("matmul",)),
):
    for _name in _names:
        OPERATOR_OF[getattr(np, _name)] = getattr(_home, _name)


def _stands_for(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
    def enter(operator: Callable[..., Any]) -> None:
        OPERATOR_OF.update(dict.fromkeys(functions, operator))

    return enter


@_stands_for(np.sum)
def _sum(a: Any, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    return reduce.sum(a, axis, keepdims)


@_stands_for(np.mean)
def _mean(a: Any, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    return reduce.mean(a, axis, keepdims)


@_stands_for(np.max, np.amax)
def _max(a: Any, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    return reduce.max(a, axis, keepdims)


@_stands_for(np.min, np.amin)
def _min(a: Any, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    return reduce.min(a, axis, keepdims)


@_stands_for(np.argmax)
def _argmax(a: Any, axis: int | None = None) -> Tensor:
    return indexing.argmax(shapes.reshape(a, -1) if axis is None else a, axis or 0)


@_stands_for(np.argmin)
def _argmin(a: Any, axis: int | None = None) -> Tensor:
    return indexing.argmin(shapes.reshape(a, -1) if axis is None else a, axis or 0)


@_stands_for(np.var)
def _var(a: Any, axis: Axes = None, *, ddof: int = 0, keepdims: bool = False) -> Tensor:
    return reduce.var(a, axis, keepdims, ddof)


@_stands_for(np.std)
def _std(a: Any, axis: Axes = None, *, ddof: int = 0, keepdims: bool = False) -> Tensor:
    return reduce.std(a, axis, keepdims, ddof)


@_stands_for(np.cumsum)
def _cumsum(a: Any, axis: int | None = None) -> Tensor:
    return cumulative.cumsum(a, axis)


@_stands_for(np.take)
def _take(a: Any, indices: Any, axis: int | None = None) -> Tensor:
    return gather.take(shapes.reshape(a, -1) if axis is None else a, indices, axis or 0)


@_stands_for(np.take_along_axis)
def _take_along_axis(arr: Any, indices: Any, axis: int = -1) -> Tensor:
    return gather.take_along_axis(arr, indices, axis)


@_stands_for(np.concatenate)
def _concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Tensor:
    if axis is None:
        return joining.concatenate([shapes.reshape(each, -1) for each in arrays], 0)
    return joining.concatenate(arrays, axis)


@_stands_for(np.stack)
def _stack(arrays: Sequence[Any], axis: int = 0) -> Tensor:
    return joining.stack(arrays, axis)


@_stands_for(np.tile)
def _tile(A: Any, reps: int | Sequence[int]) -> Tensor:
    return joining.tile(A, reps)


@_stands_for(np.pad)
def _pad(
    array: Any, pad_width: Any, mode: str = "constant", *, constant_values: float = 0
) -> Tensor:
    if mode != "constant":
        raise UsageError(f"{users_line()}: np.pad of tensors has mode 'constant', not {mode!r}")
    return joining.pad(array, pad_width, constant_values)


@_stands_for(np.clip)
def _clip(a: Any, a_min: float, a_max: float) -> Tensor:
    return elementwise.clip(a, a_min, a_max)


@_stands_for(np.where)
def _where(condition: Any, x: Any, y: Any) -> Tensor:
    return comparison.where(condition, x, y)


@_stands_for(np.reshape)
def _reshape(a: Any, shape: Sequence[Size] | Size) -> Tensor:
    return shapes.reshape(a, shape)


@_stands_for(np.ravel)
def _ravel(a: Any) -> Tensor:
    return shapes.reshape(a, -1)


@_stands_for(np.transpose)
def _transpose(a: Any, axes: Sequence[int] | None = None) -> Tensor:
    return shapes.transpose(a, axes)


@_stands_for(np.expand_dims)
def _expand_dims(a: Any, axis: int) -> Tensor:
    return shapes.expand_dims(a, axis)


@_stands_for(np.squeeze)
def _squeeze(a: Any, axis: Axes = None) -> Tensor:
    return shapes.squeeze(a, axis)


@_stands_for(np.broadcast_to)
def _broadcast_to(array: Any, shape: Sequence[Size]) -> Tensor:
    return shapes.broadcast_to(array, shape)


@_stands_for(np.zeros_like)
def _zeros_like(a: Any) -> Tensor:
    return shapes.zeros_like(a)


@_stands_for(np.ones_like)
def _ones_like(a: Any) -> Tensor:
    return shapes.ones_like(a)


@_stands_for(np.shape)
def _shape(a: Any) -> Shape:
    return as_tensor(a).shape


@_stands_for(np.ndim)
def _ndim(a: Any) -> int:
    return as_tensor(a).ndim


@_stands_for(np.size)
def _size(a: Any, axis: Axes = None) -> Tensor | int:
    tensor = as_tensor(a)
    axes = as_axes("np.size", tensor, axis)
    known = [size for each in axes if isinstance(size := tensor.shape[each], int)]
    return math.prod(known) if len(known) == len(axes) else shapes.size(tensor, axes)
