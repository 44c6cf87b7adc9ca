"""Check the arrays for `fit`, `evaluate` and `predict`."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError


def as_samples(value: Any, name: str, *, may_be_empty: bool = False) -> np.ndarray:
    """Turn an argument into an array with one row per sample.

    Raises:
        UsageError: It is no array of numbers, or has no rows.
        ShapeError: It is a scalar.
    """
    if value is None:
        raise UsageError(f"{name} is missing: pass an array with one row per sample")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} cannot be made into one array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise UsageError(
            f"{name} has dtype {array.dtype}; it takes numbers (rows of different lengths become "
            "objects: pad them; encode strings as integers)"
        )
    if not array.ndim:
        raise ShapeError(f"{name} is the scalar {array}; it needs one row per sample")
    if not len(array) and not may_be_empty:
        raise UsageError(f"{name} is empty: its shape is {array.shape}")
    return array


def as_pair(
    x: Any, y: Any, names: tuple[str, str], *, may_be_empty: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Turn samples and their targets into arrays of equal length.

    Raises:
        UsageError, ShapeError: One of them is not an array of rows, or their lengths differ.
    """
    first = as_samples(x, names[0], may_be_empty=may_be_empty)
    second = as_samples(y, names[1], may_be_empty=may_be_empty)
    if len(first) != len(second):
        raise ShapeError(
            f"{names[0]} and {names[1]} need one row per sample each, but have shapes "
            f"{first.shape} and {second.shape}: {len(first)} rows and {len(second)}"
        )
    return first, second


def as_validation(
    value: Any, *, may_be_empty: bool = False
) -> tuple[np.ndarray, np.ndarray] | None:
    """Turn `validation_data` into arrays.

    Raises:
        UsageError, ShapeError: It is no pair (x, y), or they do not fit together.
    """
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        shape = getattr(value, "shape", None)
        shown = f"{value!r:.60}" if shape is None else f"one array of shape {shape}"
        if isinstance(value, tuple | list):
            shown = f"{len(value)} values"
        raise UsageError(f"validation_data is a pair (x, y), not {shown}")
    names = ("validation x", "validation y")
    return as_pair(value[0], value[1], names, may_be_empty=may_be_empty)
