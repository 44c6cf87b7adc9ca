"""Parts of a tensor, as views: `x[1:3, ..., None]`, and the inverse for gradients."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from allreduce.errors import ShapeError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Dim, Size, Spec, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.array.gather import take
from allreduce.graph.ops.common import given_shape, reshaped
from allreduce.graph.trace.dispatch import apply, as_tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a named axis, in units of the batch size: `start`…`stop` of `total`."""

    start: int
    stop: int
    total: int


Index = slice | Part


def getitem(x: Any, key: Any) -> Tensor:
    """Take a part, as NumPy's basic indexing does, in a view; an array of integers takes rows.

    Args:
        key: Integers, slices, `...` and None, one or a tuple of them; or an array or tensor of
            integers, as `take(x, key)`. A named axis is taken as a whole, or reversed.

    Raises:
        ShapeError: The key does not fit the shape; the size of the result would not be known.
    """
    tensor = as_tensor(x)
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) == 1 and _is_array(keys[0]):
        if as_tensor(keys[0]).dtype == bool:
            _refuse(tensor, "a mask's result has a size that is not known; use ar.ops.where")
        return take(tensor, keys[0], axis=0)
    each: Any
    index: list[slice] = []
    shape: list[Size] = []  # of the result
    for each in _expanded(tensor, key, keys):
        if each is None:
            shape.append(1)
            continue
        axis = len(index)
        size = tensor.shape[axis]
        if isinstance(each, slice):
            index.append(_slice(tensor, axis, each))
            shape.append(_length(index[-1], size))
        else:
            index.append(_one(tensor, axis, each))
    if all(each == slice(None) for each in index):
        return reshaped(tensor, shape)
    return reshaped(apply("slice", tensor, index=tuple(index)), shape)


def _is_array(key: Any) -> bool:
    return isinstance(key, list | np.ndarray | Tensor) or hasattr(key, "__tensor__")


def _refuse(x: Tensor, why: str) -> NoReturn:
    raise ShapeError(f"{users_line()}: cannot index a tensor of shape {show(x.shape)}: {why}")


def _refuse_part(x: Tensor, axis: int) -> NoReturn:
    hint = "; x.numpy() can be cut" if x.has_value else ""
    _refuse(x, f"axis {axis} is as long as the batch, which a trace does not know: take all{hint}")


def _expanded(x: Tensor, key: Any, keys: tuple[Any, ...]) -> list[Any]:
    """Put whole axes in place of `...` and at the end."""
    if any(_is_array(each) for each in keys):
        _refuse(x, "an array of integers is an index by itself; use ar.ops.take for another axis")
    taken = sum(each is not None and each is not Ellipsis for each in keys)
    gaps = [i for i, each in enumerate(keys) if each is Ellipsis]
    if taken > x.ndim or len(gaps) > 1:
        _refuse(x, f"{key!r} is too long")
    at = gaps[0] if gaps else len(keys)
    whole = [slice(None)] * (x.ndim - taken)
    return [*keys[:at], *whole, *keys[at + 1 :]]


def _slice(x: Tensor, axis: int, key: slice) -> slice:
    size = x.shape[axis]
    if isinstance(size, Dim):
        if key.start is None and key.stop is None and key.step in (None, 1, -1):
            return key if key.step == -1 else slice(None)
        _refuse_part(x, axis)
    try:
        start, stop, step = key.indices(size)
    except (TypeError, ValueError) as error:
        _refuse(x, f"axis {axis}: {error}")
    if (start, stop, step) == (0, size, 1):
        return slice(None)
    if not range(start, stop, step):
        return slice(0, 0)  # a start before the array would count from its end
    return slice(start, stop if stop >= 0 else None, step)


def _length(index: slice, size: Size) -> Size:
    return size if isinstance(size, Dim) else len(range(*index.indices(size)))


def _one(x: Tensor, axis: int, key: Any) -> slice:
    """Take one element of an axis, which is dropped afterwards."""
    size = x.shape[axis]
    if isinstance(key, bool | np.bool_):
        _refuse(x, "a mask's result has a size that is not known; use ar.ops.where")
    try:
        at = operator.index(key)
    except TypeError:
        _refuse(x, f"{key!r} is no integer, slice, ... or None")
    if isinstance(size, Dim):
        _refuse_part(x, axis)
    if not -size <= at < size:
        _refuse(x, f"{at} is out of range for axis {axis}, which has {size} elements")
    return slice(at % size, at % size + 1)


def part_of_axis(x: Tensor, axis: int, start: Size, stop: Size) -> Tensor:
    """Take a range of one axis; named sizes where the axis is named."""
    whole: list[Index] = [slice(None)] * x.ndim
    total = x.shape[axis]
    if isinstance(total, Dim):
        whole[axis] = Part(_factor(start), _factor(stop), total.factor)
    else:
        assert isinstance(start, int)
        assert isinstance(stop, int)
        whole[axis] = slice(start, stop)
    return apply("slice", x, index=tuple(whole))


def _factor(size: Size) -> int:
    return size.factor if isinstance(size, Dim) else size


def _running(index: Sequence[Index], shape: Sequence[int]) -> tuple[slice, ...]:
    """Give named ranges the sizes they have in this run."""
    return tuple(
        each
        if isinstance(each, slice)
        else slice(each.start * (size // each.total), each.stop * (size // each.total))
        for each, size in zip(index, shape, strict=True)
    )


def _slice_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    (x,) = specs
    sizes: list[Size] = []
    for index, size in zip(attrs["index"], x.shape, strict=True):
        if isinstance(index, Part):
            assert isinstance(size, Dim)
            sizes.append(Dim(size.name, index.stop - index.start))
        else:
            sizes.append(_length(index, size))
    return Spec(tuple(sizes), x.dtype)


def _unslice(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    out.fill(0)
    out[_running(attrs["index"], out.shape)] = inputs[0]


register(
    "slice",
    _slice_shape,
    gradient=lambda dy, y, x, attrs: [apply("unslice", dy, index=attrs["index"], shape=x[0].shape)],
    view=lambda x, attrs: x[_running(attrs["index"], x.shape)],
)
register(
    "unslice",
    given_shape,
    _unslice,
    lambda dy, y, x, attrs: [apply("slice", dy, index=attrs["index"])],
)
