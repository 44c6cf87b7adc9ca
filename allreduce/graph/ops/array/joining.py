"""Several tensors as one, and one as several."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Dim, Shape, Size, Spec, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axis, as_held, as_shape
from allreduce.graph.ops.array.shape import broadcast_to, expand_dims
from allreduce.graph.ops.array.slicing import part_of_axis
from allreduce.graph.ops.common import promote_together, reshaped
from allreduce.graph.trace.dispatch import apply, as_tensor


def concatenate(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Join tensors along an axis that exists; their other sizes, and ranks, are equal.

    Raises:
        ShapeError: They do not fit; a named size would be added to a number.
    """
    parts = promote_together(*_several("concatenate", tensors))
    at = as_axis("concatenate", parts[0], axis)
    return parts[0] if len(parts) == 1 else apply("concatenate", *parts, axis=at)


def _several(what: str, tensors: Any) -> list[Any]:
    if not isinstance(tensors, list | tuple) or not tensors:
        raise UsageError(
            f"{users_line()}: {what} takes a list of tensors, not {type(tensors).__name__} "
            f"{tensors!r:.60}"
        )
    return list(tensors)


def _added(a: Size, b: Size) -> Size:
    if isinstance(a, Dim) and isinstance(b, Dim):
        return Dim(a.name, a.factor + b.factor)
    if isinstance(a, Dim) or isinstance(b, Dim):
        raise ShapeError(f"an axis of {a} and one of {b} together have a size without a name")
    return a + b


def _concatenate_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    axis = attrs["axis"]
    first = specs[0].shape

    def beside(shape: Shape) -> Shape:
        return shape[:axis] + shape[axis + 1 :]

    for spec in specs[1:]:
        if spec.ndim != len(first) or beside(spec.shape) != beside(first):
            raise ShapeError(
                f"shapes {show(first)} and {show(spec.shape)} differ in axes other than {axis}"
            )
    size = reduce(_added, (spec.shape[axis] for spec in specs))
    return Spec((*first[:axis], size, *first[axis + 1 :]), specs[0].dtype)


def _concatenate(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    np.concatenate(inputs, axis=attrs["axis"], out=out)


def _concatenate_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    return _parts(dy, [part.shape[attrs["axis"]] for part in x], attrs["axis"])


def _parts(x: Tensor, sizes: Sequence[Size], axis: int) -> list[Tensor]:
    ends: list[Size] = [sizes[0] * 0]
    for size in sizes:
        ends.append(_added(ends[-1], size))
    return [part_of_axis(x, axis, start, stop) for start, stop in pairwise(ends)]


register("concatenate", _concatenate_shape, _concatenate, _concatenate_gradient)


def stack(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Join tensors of one shape along a new axis.

    Raises:
        ShapeError: Their shapes differ.
    """
    parts = promote_together(*_several("stack", tensors))
    if len({part.shape for part in parts}) > 1:
        shapes = " and ".join(dict.fromkeys(show(part.shape) for part in parts))
        raise ShapeError(f"{users_line()}: stack needs one shape, got {shapes}")
    at = as_axis("stack", parts[0], axis, new=1)
    return concatenate([expand_dims(part, at) for part in parts], at)


def split(x: Any, parts: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Cut an axis into so many equal parts, or into parts of the given sizes; views.

    Raises:
        ShapeError: The parts do not fill the axis, or its size is not known.
    """
    tensor = as_tensor(x)
    at = as_axis("split", tensor, axis)
    size = tensor.shape[at]
    if isinstance(parts, Sequence | np.ndarray):
        sizes: Sequence[Size] = as_shape("split", parts)
    else:
        (count,) = as_shape("the parts of split", (parts,), smallest=1)
        assert isinstance(count, int)
        whole = size.factor if isinstance(size, Dim) else size
        each = whole // count
        sizes = [Dim(size.name, each) if isinstance(size, Dim) else each] * count
    if not sizes or _total(sizes) != size:
        raise ShapeError(
            f"{users_line()}: split of {show(tensor.shape)}: axis {at} cannot be cut into {parts}"
        )
    return _parts(tensor, sizes, at)


def _total(sizes: Sequence[Size]) -> Size | None:
    named = {isinstance(size, Dim) for size in sizes}
    return reduce(_added, sizes) if len(named) == 1 else None


def tile(x: Any, repeats: int | Sequence[int]) -> Tensor:
    """Repeat a tensor so many times along each axis, new ones in front, as `np.tile` does."""
    tensor = as_tensor(x)
    times = as_shape("tile", repeats)
    ndim = max(tensor.ndim, len(times))
    shape: tuple[Size, ...] = (1,) * (ndim - tensor.ndim) + tensor.shape
    counts = (1,) * (ndim - len(times)) + times
    if any(isinstance(count, Dim) for count in counts):
        raise ShapeError(f"{users_line()}: tile repeats a number of times, not {show(times)}")
    pairs = [(count, size) for count, size in zip(counts, shape, strict=True)]
    apart = reshaped(tensor, [each for _, size in pairs for each in (1, size)])
    wide = broadcast_to(apart, [each for pair in pairs for each in pair])
    return reshaped(wide, [operator.mul(size, count) for count, size in pairs])


def pad(x: Any, widths: Sequence[Sequence[int]] | Sequence[int] | int, value: float = 0) -> Tensor:
    """Surround a tensor with elements of one value.

    Args:
        widths: How many before and after each axis, `((1, 2), (0, 0))`; one pair, or one number,
            is for all axes. A named axis gets none.
        value: A Python number.

    Raises:
        ShapeError: The widths are negative, or not one pair per axis.
        UsageError: The value is no number, or one that the dtype does not hold.
    """
    tensor = as_tensor(x)
    try:
        pairs = np.broadcast_to(np.asarray(widths, dtype=object), (tensor.ndim, 2)).tolist()
    except ValueError:
        raise ShapeError(
            f"{users_line()}: pad of {show(tensor.shape)} needs a pair of widths for each axis, "
            f"got {widths!r:.60}"
        ) from None
    before_after = tuple(as_shape("the widths of pad", pair) for pair in pairs)
    as_held("the value of pad", value, tensor.dtype)
    return apply("pad", tensor, widths=before_after, value=value)


def _pad_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    (x,) = specs
    sizes: list[Size] = []
    for size, (before, after) in zip(x.shape, attrs["widths"], strict=True):
        sizes.append(_added(size, before + after) if before + after else size)
    return Spec(tuple(sizes), x.dtype)


def _inner(shape: Sequence[Size], attrs: Attrs) -> tuple[slice, ...]:
    """Return the index of the part without padding; a named axis has none."""
    return tuple(
        slice(None) if isinstance(size, Dim) else slice(before, size - after)
        for size, (before, after) in zip(shape, attrs["widths"], strict=True)
    )


def _pad(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    out.fill(attrs["value"])
    out[_inner(out.shape, attrs)] = inputs[0]


register(
    "pad",
    _pad_shape,
    _pad,
    lambda dy, y, x, attrs: [apply("slice", dy, index=_inner(dy.shape, attrs))],
)
