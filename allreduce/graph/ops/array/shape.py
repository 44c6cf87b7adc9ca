"""Operators that change the shape, or make a value of one; any size may be a named one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from allreduce.errors import ShapeError
from allreduce.graph.core.op_table import Attrs, cut, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Shape, Size, Spec, broadcast, show, size_of
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axes, as_axis, as_dtype, as_held, as_shape
from allreduce.graph.ops.common import cast, given_shape, reshaped, running_shape, unbroadcast
from allreduce.graph.trace.dispatch import apply, as_tensor


def reshape(x: Any, shape: Sequence[Size] | Size) -> Tensor:
    """Return the elements, in row-major order, in another shape; one size may be -1."""
    return reshaped(as_tensor(x), as_shape("reshape", shape, smallest=-1))


def _reshape(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    return x.reshape(running_shape(attrs["shape"], x, attrs["named"]))


register(
    "reshape",
    given_shape,
    gradient=lambda dy, y, x, attrs: [reshaped(dy, x[0].shape)],
    view=_reshape,
)


def _reshape_copy(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    np.copyto(out.reshape(inputs[0].shape), inputs[0])


# The form of a reshape that cannot be a view, once all gradients are recorded.
register("reshape_copy", given_shape, _reshape_copy)


def flatten(x: Any) -> Tensor:
    """Merge all axes but the first: `(batch, height, width)` to `(batch, height*width)`."""
    tensor = as_tensor(x)
    try:
        rest = size_of(tensor.shape[1:])
    except ShapeError as error:
        raise ShapeError(f"{users_line()}: flatten: {error}") from None
    return reshaped(tensor, (*tensor.shape[:1], rest))


def expand_dims(x: Any, axis: int) -> Tensor:
    """Insert an axis of size 1 before `axis`."""
    tensor = as_tensor(x)
    at = as_axis("expand_dims", tensor, axis, new=1)
    return reshaped(tensor, (*tensor.shape[:at], 1, *tensor.shape[at:]))


def squeeze(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """Drop axes of size 1: those given, or all that are known to have it.

    Raises:
        ShapeError: A given axis has another size.
    """
    tensor = as_tensor(x)
    if axis is None:
        axes = tuple(i for i, size in enumerate(tensor.shape) if size == 1)
    else:
        axes = as_axes("squeeze", tensor, axis)
    for each in axes:
        if tensor.shape[each] != 1:
            raise ShapeError(
                f"{users_line()}: squeeze of {show(tensor.shape)}: axis {each} is not of size 1"
            )
    return reshaped(tensor, [size for i, size in enumerate(tensor.shape) if i not in axes])


def transpose(x: Any, axes: Sequence[int] | None = None) -> Tensor:
    """Reorder the axes: `axes[i]` becomes axis i; by default they are reversed. Copies nothing."""
    tensor = as_tensor(x)
    wanted = range(tensor.ndim)[::-1] if axes is None else axes
    each = wanted if isinstance(wanted, Iterable) else (wanted,)
    order = [as_axis("transpose", tensor, axis) for axis in each]
    if sorted(order) != list(range(tensor.ndim)):
        raise ShapeError(
            f"{users_line()}: transpose of {show(tensor.shape)}: {axes} are not all of its axes"
        )
    return apply("transpose", tensor, axes=tuple(order))


def _transpose_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    return Spec(tuple(specs[0].shape[axis] for axis in attrs["axes"]), specs[0].dtype)


def _transpose_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    axes = attrs["axes"]
    return [apply("transpose", dy, axes=tuple(axes.index(axis) for axis in range(len(axes))))]


register(
    "transpose",
    _transpose_shape,
    gradient=_transpose_gradient,
    view=lambda x, attrs: x.transpose(attrs["axes"]),
)


def broadcast_to(x: Any, shape: Sequence[Size], dtype: Any = None) -> Tensor:
    """Repeat along axes of size 1 and new leading axes, by NumPy's rule.

    Raises:
        ShapeError: The shape does not broadcast to `shape`.
    """
    tensor = as_tensor(x) if dtype is None else cast(x, dtype)
    wanted = as_shape("broadcast_to", shape)
    return tensor if tensor.shape == wanted else apply("broadcast_to", tensor, shape=wanted)


def _broadcast_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    shape: Shape = attrs["shape"]
    if broadcast([specs[0].shape, shape]) != shape:
        raise ShapeError(f"shape {show(specs[0].shape)} does not broadcast to {show(shape)}")
    return Spec(shape, specs[0].dtype)


def _broadcast(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    np.copyto(out, inputs[0])


register(
    "broadcast_to", _broadcast_shape, _broadcast, lambda dy, y, x, attrs: [unbroadcast(dy, x[0])]
)


def full(shape: Sequence[Size], value: float, dtype: Any = "float32") -> Tensor:
    """Make a tensor with all elements equal to a Python number, one that the dtype holds."""
    kind = as_dtype(dtype)
    as_held("full", value, kind)
    return apply("fill", shape=as_shape("full", shape), dtype=kind, value=value)


def zeros(shape: Sequence[Size], dtype: Any = "float32") -> Tensor:
    """Make a tensor of zeros."""
    return full(shape, 0, dtype)


def ones(shape: Sequence[Size], dtype: Any = "float32") -> Tensor:
    """Make a tensor of ones."""
    return full(shape, 1, dtype)


def zeros_like(x: Any) -> Tensor:
    """Make zeros of a tensor's shape and dtype."""
    tensor = as_tensor(x)
    return full(tensor.shape, 0, tensor.dtype)


def ones_like(x: Any) -> Tensor:
    """Make ones of a tensor's shape and dtype."""
    tensor = as_tensor(x)
    return full(tensor.shape, 1, tensor.dtype)


def _fill(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    out.fill(attrs["value"])


register("fill", lambda specs, attrs: Spec(attrs["shape"], attrs["dtype"]), _fill)


def size(x: Any, axis: int | Sequence[int] | None = None, dtype: Any = "int64") -> Tensor:
    """Count elements, or those along some axes, when the step runs: a scalar."""
    tensor = as_tensor(x)
    return apply("size", tensor, axes=as_axes("size", tensor, axis), dtype=as_dtype(dtype))


def _size(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    count = 1
    for axis in attrs["axes"]:
        count *= inputs[0].shape[axis]
    out.fill(count)


register("size", lambda specs, attrs: Spec((), attrs["dtype"]), _size, cut)
