"""Arguments that are no tensors, checked where they enter: dtypes, numbers, axes and shapes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError, did_you_mean
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Dim, Shape, Size, normal, normalize_axes, show
from allreduce.graph.core.tensor import Tensor


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Read a dtype of numbers or booleans."""
    try:
        wanted: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        near = did_you_mean(dtype, np.sctypeDict)
        raise UsageError(f"{users_line()}: {dtype!r} is no dtype{near}") from None
    if wanted.kind in "OSUMm":
        raise UsageError(f"{users_line()}: tensors hold numbers or booleans, not {wanted}")
    return wanted


def as_number(what: str, value: Any) -> Any:
    """Return a number, Python's or NumPy's; refuse anything else."""
    if not isinstance(value, Real | np.bool_):
        raise UsageError(
            f"{users_line()}: {what} is a number, not {type(value).__name__} {value!r:.60}"
        )
    return value


def as_held(what: str, value: Any, dtype: np.dtype[Any]) -> None:
    """Refuse a number that a dtype does not hold."""
    try:
        np.asarray(as_number(what, value), dtype)
    except (OverflowError, ValueError) as error:
        raise UsageError(f"{users_line()}: {what}: {error}") from None


def as_axes(what: str, x: Tensor, axis: Any, new: int = 0) -> tuple[int, ...]:
    """Read the axes of `x` that an operator works along, `new` ones that it inserts included."""
    try:
        return normalize_axes(axis, x.ndim + new)
    except ShapeError as error:
        raise ShapeError(f"{users_line()}: {what} of {show(x.shape)}: {error}") from None


def as_axis(what: str, x: Tensor, axis: Any, new: int = 0) -> int:
    """Read one axis, as `as_axes` does several."""
    axes = as_axes(what, x, axis, new)
    if axis is None or len(axes) != 1:
        raise ShapeError(f"{users_line()}: {what} of {show(x.shape)}: needs one axis, got {axis}")
    return axes[0]


def as_shape(what: str, shape: Any, smallest: int = 0) -> Shape:
    """Read a shape: sizes that are integers or named, or a single one."""
    sizes = shape if isinstance(shape, Sequence | np.ndarray) else (shape,)
    try:
        result = tuple(_as_size(size) for size in sizes)
    except TypeError:
        raise ShapeError(f"{users_line()}: {what}: sizes are integers, not {shape!r:.60}") from None
    if any(isinstance(size, int) and size < smallest for size in result):
        raise ShapeError(
            f"{users_line()}: {what}: sizes are {smallest} or more, got {show(result)}"
        )
    return result


def _as_size(size: Any) -> Size:
    return normal(size) if isinstance(size, Dim) else operator.index(size)
