"""The operators that stand for NumPy's functions which join, cut and reshape arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Size, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axes, as_axis
from allreduce.graph.ops.array import joining, slicing
from allreduce.graph.ops.array import shape as shapes
from allreduce.graph.ops.common import swap_axes
from allreduce.graph.ops.numpy.names import Axes, stands_for
from allreduce.graph.trace.dispatch import as_tensor


@stands_for(np.concatenate)
def _concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Tensor:
    if axis is None:
        return joining.concatenate([shapes.reshape(each, -1) for each in arrays], 0)
    return joining.concatenate(arrays, axis)


@stands_for(np.stack)
def _stack(arrays: Sequence[Any], axis: int = 0) -> Tensor:
    return joining.stack(arrays, axis)


@stands_for(np.vstack)
def _vstack(tup: Sequence[Any]) -> Tensor:
    rows = [as_tensor(each) for each in tup]
    return joining.concatenate([_leading(each, 2) for each in rows], 0)


@stands_for(np.hstack)
def _hstack(tup: Sequence[Any]) -> Tensor:
    parts = [_leading(as_tensor(each), 1) for each in tup]
    return joining.concatenate(parts, 0 if parts and parts[0].ndim == 1 else 1)


def _leading(x: Tensor, ndim: int) -> Tensor:
    """Put axes of size 1 in front until there are as many as asked for."""
    return shapes.reshape(x, (*[1] * (ndim - x.ndim), *x.shape))


@stands_for(np.split)
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


@stands_for(np.flip)
def _flip(m: Any, axis: Axes = None) -> Tensor:
    tensor = as_tensor(m)
    axes = as_axes("np.flip", tensor, axis)
    step = [slice(None, None, -1 if i in axes else None) for i in range(tensor.ndim)]
    return slicing.getitem(tensor, tuple(step))


@stands_for(np.tile)
def _tile(A: Any, reps: int | Sequence[int]) -> Tensor:
    return joining.tile(A, reps)


@stands_for(np.pad)
def _pad(
    array: Any, pad_width: Any, mode: str = "constant", *, constant_values: float = 0
) -> Tensor:
    if mode != "constant":
        raise UsageError(f"{users_line()}: np.pad of tensors has mode 'constant', not {mode!r}")
    return joining.pad(array, pad_width, constant_values)


@stands_for(np.reshape)
def _reshape(a: Any, shape: Sequence[Size] | Size) -> Tensor:
    return shapes.reshape(a, shape)


@stands_for(np.ravel)
def _ravel(a: Any) -> Tensor:
    return shapes.reshape(a, -1)


@stands_for(np.transpose)
def _transpose(a: Any, axes: Sequence[int] | None = None) -> Tensor:
    return shapes.transpose(a, axes)


@stands_for(np.swapaxes)
def _swapaxes(a: Any, axis1: int, axis2: int) -> Tensor:
    tensor = as_tensor(a)
    first, second = (as_axis("np.swapaxes", tensor, axis) for axis in (axis1, axis2))
    return swap_axes(tensor, first, second)


@stands_for(np.moveaxis)
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


@stands_for(np.expand_dims)
def _expand_dims(a: Any, axis: int) -> Tensor:
    return shapes.expand_dims(a, axis)


@stands_for(np.squeeze)
def _squeeze(a: Any, axis: Axes = None) -> Tensor:
    return shapes.squeeze(a, axis)


@stands_for(np.broadcast_to)
def _broadcast_to(array: Any, shape: Sequence[Size]) -> Tensor:
    return shapes.broadcast_to(array, shape)
