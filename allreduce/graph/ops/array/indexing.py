"""Operators that take or give indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.spec import Dim, Spec, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axis, as_dtype, as_shape
from allreduce.graph.ops.common import as_integers
from allreduce.graph.trace.dispatch import apply, as_tensor


def argmax(x: Any, axis: int = -1) -> Tensor:
    """Find where the largest element along an axis is; the first of equal ones. int64."""
    tensor = as_tensor(x)
    return apply("argmax", tensor, axis=as_axis("argmax", tensor, axis))


def argmin(x: Any, axis: int = -1) -> Tensor:
    """Find where the smallest element along an axis is; the first of equal ones. int64."""
    tensor = as_tensor(x)
    return apply("argmin", tensor, axis=as_axis("argmin", tensor, axis))


def _argmax_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    shape, axis = specs[0].shape, attrs["axis"]
    if shape[axis] == 0:
        raise ShapeError(f"{show(shape)} has nothing along axis {axis} to choose from")
    return Spec(shape[:axis] + shape[axis + 1 :], np.dtype(np.int64))


def _argmax(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    if out.size:
        np.argmax(inputs[0], axis=attrs["axis"], out=out)


def _argmin(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    if out.size:
        np.argmin(inputs[0], axis=attrs["axis"], out=out)


register("argmax", _argmax_shape, _argmax)
register("argmin", _argmax_shape, _argmin)


def one_hot(labels: Any, depth: int, dtype: Any = "float32") -> Tensor:
    """Write each label as a row of zeros with a one at the label.

    Args:
        labels: `(…)`, integers in 0…depth-1, which is checked when the step runs.
        depth: The number of classes.
        dtype: Of the result, which is `(…, depth)`.

    Raises:
        UsageError: The labels are not integers, or when the step runs, one is out of range.
        ShapeError: The depth is less than 1.
    """
    tensor = as_integers("the labels of one_hot", labels)
    (classes,) = as_shape("the depth of one_hot", (depth,), smallest=1)
    if isinstance(classes, Dim):
        raise classes.unknown()
    return apply("one_hot", tensor, depth=classes, dtype=as_dtype(dtype))


def _one_hot(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    (labels,) = inputs
    depth = attrs["depth"]
    bad = (labels < 0) | (labels >= depth)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise UsageError(f"label {labels.flat[row]} in row {row} is outside of 0…{depth - 1}")
    out.fill(0)
    rows = out.reshape(-1, depth)
    rows[np.arange(len(rows)), labels.reshape(-1)] = 1


register(
    "one_hot",
    lambda specs, attrs: Spec((*specs[0].shape, attrs["depth"]), attrs["dtype"]),
    _one_hot,
)
