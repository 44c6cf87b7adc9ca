"""Map NumPy's functions to operators: `np.exp(tensor)` is `ar.ops.exp(tensor)`.

The functions take the arguments that the operator supports, under NumPy's names. Element-wise
operators are NumPy's ufuncs, and in the table from where they are made (`common.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.numpy_calls import OPERATOR_OF
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Shape, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axes, as_axis
from allreduce.graph.ops.array import gather, indexing, joining, slicing
from allreduce.graph.ops.array import shape as shapes
from allreduce.graph.ops.common import cast, swap_axes
from allreduce.graph.ops.math import comparison, cumulative, elementwise, matmul, reduce
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.trace import current_trace

Axes = int | Sequence[int] | None


def _renamed(operator: Callable[..., Any], names: str, named: str = "") -> Callable[..., Any]:
    """Return an operator with NumPy's names of its first parameters; `named` ones by name only."""
    own = list(inspect.signature(operator).parameters.values())
    numpys = dict(zip(names.split(), own, strict=False))
    signature = inspect.Signature(
        [
            each.replace(name=name, kind=each.KEYWORD_ONLY if name in named.split() else each.kind)
            for name, each in numpys.items()
        ]
    )

    def renamed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return operator(**{numpys[name].name: value for name, value in given.items()})

    renamed.__signature__ = signature  # type: ignore[attr-defined]
    return renamed


_SAME: dict[Callable[..., Any], Callable[..., Any]] = {
    np.sum: _renamed(reduce.sum, "a axis keepdims", "keepdims"),
    np.mean: _renamed(reduce.mean, "a axis keepdims", "keepdims"),
    **dict.fromkeys((np.max, np.amax), _renamed(reduce.max, "a axis keepdims", "keepdims")),
    **dict.fromkeys((np.min, np.amin), _renamed(reduce.min, "a axis keepdims", "keepdims")),
    np.var: _renamed(reduce.var, "a axis keepdims ddof", "keepdims ddof"),
    np.std: _renamed(reduce.std, "a axis keepdims ddof", "keepdims ddof"),
    np.cumsum: _renamed(cumulative.cumsum, "a axis"),
    np.take_along_axis: _renamed(gather.take_along_axis, "arr indices axis"),
    np.clip: _renamed(elementwise.clip, "a a_min a_max"),
    np.where: _renamed(comparison.where, "condition x y"),
    np.zeros_like: _renamed(shapes.zeros_like, "a"),
    np.ones_like: _renamed(shapes.ones_like, "a"),
    np.stack: _renamed(joining.stack, "arrays axis"),
    np.tile: _renamed(joining.tile, "A reps"),
    np.reshape: _renamed(shapes.reshape, "a shape"),
    np.transpose: _renamed(shapes.transpose, "a axes"),
    np.expand_dims: _renamed(shapes.expand_dims, "a axis"),
    np.squeeze: _renamed(shapes.squeeze, "a axis"),
    np.broadcast_to: _renamed(shapes.broadcast_to, "array shape"),
    np.matmul: matmul.matmul,
    np.power: elementwise.power,  # which has short cuts
}
OPERATOR_OF.update(_SAME)
if hasattr(np, "astype"):  # from NumPy 2.1 on
    OPERATOR_OF[np.astype] = _renamed(cast, "x dtype")


def implements(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
    """Have the function that follows stand for some of NumPy's."""

    def enter(operator: Callable[..., Any]) -> None:
        OPERATOR_OF.update(dict.fromkeys(functions, operator))

    return enter


@implements(np.argmax)
def _argmax(a: Any, axis: int | None = None) -> Tensor:
    return indexing.argmax(shapes.reshape(a, -1) if axis is None else a, axis or 0)


@implements(np.argmin)
def _argmin(a: Any, axis: int | None = None) -> Tensor:
    return indexing.argmin(shapes.reshape(a, -1) if axis is None else a, axis or 0)


@implements(np.take)
def _take(a: Any, indices: Any, axis: int | None = None) -> Tensor:
    return gather.take(shapes.reshape(a, -1) if axis is None else a, indices, axis or 0)


@implements(np.full_like)
def _full_like(a: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    tensor = as_tensor(a)
    kind = tensor.dtype if dtype is None else dtype
    if isinstance(fill_value, int | float):
        return shapes.full(tensor.shape, fill_value, kind)
    return shapes.broadcast_to(fill_value, tensor.shape, kind)


@implements(np.copy)
def _copy(a: Any) -> Tensor:
    if current_trace() is None:
        raise UsageError(f"{users_line()}: np.copy of a value makes an array, to be written to")
    return as_tensor(a)


@implements(np.shape)
def _shape(a: Any) -> Shape:
    return as_tensor(a).shape


@implements(np.ndim)
def _ndim(a: Any) -> int:
    return as_tensor(a).ndim


@implements(np.size)
def _size(a: Any, axis: Axes = None) -> Tensor | int:
    tensor = as_tensor(a)
    axes = as_axes("np.size", tensor, axis)
    known = [size for each in axes if isinstance(size := tensor.shape[each], int)]
    return math.prod(known) if len(known) == len(axes) else shapes.size(tensor, axes)


@implements(np.concatenate)
def _concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Tensor:
    if axis is None:
        return joining.concatenate([shapes.reshape(each, -1) for each in arrays], 0)
    return joining.concatenate(arrays, axis)


@implements(np.vstack)
def _vstack(tup: Sequence[Any]) -> Tensor:
    rows = [as_tensor(each) for each in tup]
    return joining.concatenate([_leading(each, 2) for each in rows], 0)


@implements(np.hstack)
def _hstack(tup: Sequence[Any]) -> Tensor:
    parts = [_leading(as_tensor(each), 1) for each in tup]
    return joining.concatenate(parts, 0 if parts and parts[0].ndim == 1 else 1)


def _leading(x: Tensor, ndim: int) -> Tensor:
    """Put axes of size 1 in front until there are as many as asked for."""
    return shapes.reshape(x, (*[1] * (ndim - x.ndim), *x.shape))


@implements(np.split)
def _split(ary: Any, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    if not isinstance(indices_or_sections, Sequence | np.ndarray):
        return joining.split(ary, indices_or_sections, axis)
    tensor = as_tensor(ary)
    whole: list[Any] = [slice(None)] * tensor.ndim
    at = as_axis("np.split", tensor, axis)
    ends = [None, *indices_or_sections, None]
    return [
        slicing.getitem(tensor, (*whole[:at], slice(start, stop), *whole[at + 1 :]))
        for start, stop in pairwise(ends)
    ]


@implements(np.flip)
def _flip(m: Any, axis: Axes = None) -> Tensor:
    tensor = as_tensor(m)
    axes = as_axes("np.flip", tensor, axis)
    step = [slice(None, None, -1 if i in axes else None) for i in range(tensor.ndim)]
    return slicing.getitem(tensor, tuple(step))


@implements(np.pad)
def _pad(
    array: Any, pad_width: Any, mode: str = "constant", *, constant_values: float = 0
) -> Tensor:
    if mode != "constant":
        raise UsageError(f"{users_line()}: np.pad of tensors has mode 'constant', not {mode!r}")
    return joining.pad(array, pad_width, constant_values)


@implements(np.ravel)
def _ravel(a: Any) -> Tensor:
    return shapes.reshape(a, -1)


@implements(np.swapaxes)
def _swapaxes(a: Any, axis1: int, axis2: int) -> Tensor:
    tensor = as_tensor(a)
    first, second = (as_axis("np.swapaxes", tensor, axis) for axis in (axis1, axis2))
    return swap_axes(tensor, first, second)


@implements(np.moveaxis)
def _moveaxis(a: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    tensor = as_tensor(a)
    come, go = (_in_order("np.moveaxis", tensor, each) for each in (source, destination))
    if len(come) != len(go):
        raise ShapeError(
            f"{users_line()}: np.moveaxis of {show(tensor.shape)}: {source} and {destination} are "
            "not of one length"
        )
    order = [axis for axis in range(tensor.ndim) if axis not in come]
    for place, axis in sorted(zip(go, come, strict=True)):
        order.insert(place, axis)
    return shapes.transpose(tensor, order)


def _in_order(what: str, x: Tensor, axes: int | Sequence[int]) -> list[int]:
    """Read axes as `as_axes` does, but keep their order."""
    listed = axes if isinstance(axes, Sequence) else [axes]
    as_axes(what, x, axes)
    return [as_axis(what, x, axis) for axis in listed]
