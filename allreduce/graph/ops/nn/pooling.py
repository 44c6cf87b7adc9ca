"""Pooling of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.errors import ShapeError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Spec, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.array.windows import Pair, Windows, windows_on, windows_shape
from allreduce.graph.ops.common import as_floats, given_shape, through_float32, zeros_like
from allreduce.graph.ops.math.reduce import counting, mean
from allreduce.graph.ops.math.reduce import max as largest
from allreduce.graph.trace.dispatch import apply, as_tensor


def max_pool2d(
    x: Any, size: int | Pair = 2, strides: int | Pair | None = None, padding: Any = "valid"
) -> Tensor:
    """Take the largest pixel of each window, by channel; the first of equal ones has the gradient.

    Args:
        x: `(batch, height, width, channels)`, floats.
        size: Of the windows, for both axes or as (height, width).
        strides: The distance between windows; by default their size.
        padding: "valid", "same", or ((top, bottom), (left, right)); padding is never the largest.

    Raises:
        ShapeError: The windows do not fit the images, or lie in the padding alone.
    """
    return _pool("max_pool2d", x, size, strides, padding)


def average_pool2d(
    x: Any, size: int | Pair = 2, strides: int | Pair | None = None, padding: Any = "valid"
) -> Tensor:
    """Average the pixels of each window, by channel; padding does not count.

    Args:
        x: `(batch, height, width, channels)`.
        size: The windows' height and width, as for `max_pool2d`.
        strides: Pixels from window to window, as for `max_pool2d`.
        padding: As for `max_pool2d`.

    Raises:
        ShapeError: The windows do not fit the images, or lie in the padding alone.
    """
    return _pool("average_pool2d", x, size, strides, padding)


def global_average_pool2d(x: Any, keepdims: bool = False) -> Tensor:
    """Average over height and width: `(batch, height, width, channels)` to `(batch, channels)`.

    Raises:
        ShapeError: `x` does not have four axes.
    """
    return mean(_images("global_average_pool2d", x), axis=(1, 2), keepdims=keepdims)


def global_max_pool2d(x: Any, keepdims: bool = False) -> Tensor:
    """Take the largest over height and width: the shapes are those of `global_average_pool2d`.

    Raises:
        ShapeError: `x` does not have four axes.
    """
    return largest(_images("global_max_pool2d", x), axis=(1, 2), keepdims=keepdims)


def _images(name: str, x: Any) -> Tensor:
    tensor = as_tensor(x)
    if tensor.ndim != 4:
        raise ShapeError(
            f"{users_line()}: {name} takes images (batch, height, width, channels), not "
            f"{show(tensor.shape)}"
        )
    return tensor


def _pool(name: str, x: Any, size: Any, strides: Any, padding: Any) -> Tensor:
    images = as_floats(x)
    windows = windows_on(name, images, size, size if strides is None else strides, padding)
    return apply(name, images, windows=windows)


def _shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    channels = specs[0].shape[3]
    assert isinstance(channels, int)
    windows: Windows = attrs["windows"]
    pooled = windows_shape(specs[0], windows, channels)
    if windows.miss(specs[0].shape[1:3], pooled.shape[1:3]):
        raise ShapeError(
            f"some of the windows of {windows.size} lie outside of the images "
            f"{show(specs[0].shape)} and hold nothing: pad less than "
            f"{windows.before} and {windows.after}"
        )
    return pooled


@through_float32
def _max(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    if out.size:
        _native.max_pool2d(out, inputs[0], attrs["windows"].numbers)


@through_float32
def _max_gradient(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    dy, x, y = inputs
    if out.size:
        _native.max_pool2d_gradient(out, dy, x, y, attrs["windows"].numbers)


def _chosen(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    """Give each window the element of `u` where its largest pixel is."""
    u, x, y = inputs
    windows: Windows = attrs["windows"]
    wide, wide_u = windows.pad(x, -np.inf), windows.pad(u, 0)
    out.fill(0)
    left = np.ones(out.shape, bool)  # which has not been found yet
    for _, _, place in windows.taps(out.shape[1:3]):
        here = (wide[place] == y) & left
        np.copyto(out, wide_u[place], where=here)
        left &= ~here


def _counts(windows: Windows, image: Sequence[int], count: Pair, dtype: Any) -> np.ndarray:
    """Count the pixels of the image in each window, `(1, windows, windows, 1)`."""
    ones = windows.pad(np.ones((1, *image, 1), dtype), 0)
    return sum((ones[place] for _, _, place in windows.taps(count)), np.zeros((), dtype))


def _average(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    windows: Windows = attrs["windows"]
    (x,) = inputs
    wide = windows.pad(x, 0)
    sums = np.zeros(out.shape, counting(out.dtype))
    for _, _, place in windows.taps(out.shape[1:3]):
        np.add(sums, wide[place], out=sums)
    np.divide(sums, _counts(windows, x.shape[1:3], out.shape[1:3], sums.dtype), out=out)


def _average_gradient(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    windows: Windows = attrs["windows"]
    (dy,) = inputs
    image, count = out.shape[1:3], dy.shape[1:3]
    each = dy / _counts(windows, image, count, counting(dy.dtype))
    wide = np.zeros((len(out), *windows.padded(image), out.shape[3]), each.dtype)
    for _, _, place in windows.taps(count):
        wide[place] += each
    out[...] = windows.inside(wide, image)


register(
    "max_pool2d",
    _shape,
    _max,
    lambda dy, y, x, attrs: [apply("max_pool2d_gradient", dy, x[0], y, windows=attrs["windows"])],
)
register(
    "max_pool2d_gradient",
    lambda specs, attrs: Spec(specs[1].shape, specs[0].dtype),
    _max_gradient,
    lambda u, y, x, attrs: [
        apply("max_pool2d_chosen", u, *x[1:], **attrs),
        *map(zeros_like, x[1:]),
    ],
)
register(
    "max_pool2d_chosen",
    lambda specs, attrs: Spec(specs[2].shape, specs[0].dtype),
    _chosen,
    lambda dy, y, x, attrs: [
        apply("max_pool2d_gradient", dy, *x[1:], **attrs),
        *map(zeros_like, x[1:]),
    ],
)
register(
    "average_pool2d",
    _shape,
    _average,
    lambda dy, y, x, attrs: [
        apply("average_pool2d_gradient", dy, windows=attrs["windows"], shape=x[0].shape)
    ],
)
register(
    "average_pool2d_gradient",
    given_shape,
    _average_gradient,
    lambda dy, y, x, attrs: [apply("average_pool2d", dy, windows=attrs["windows"])],
)
