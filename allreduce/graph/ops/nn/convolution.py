"""Two-dimensional convolution.

Without groups, of float32 and float64, native code multiplies where the pixels are
(`kernels/cpu/nn/convolution.h`). All else is columns times a matrix: the windows' pixels of a few
images at a time, or of part of a large one, are copied into rows, so that BLAS does the rest
(Chellapilla, Puri and Simard, "High performance convolutional neural networks for document
processing", 2006). A kernel of 1×1 needs no copy.

In the same run on one core (Zen 3, float32, 3×3, milliseconds): native code and columns take, of
(64, 32, 32, 32) to 32 filters, 16 and 27, 17 and 23 for the images' gradient, 16 and 33 for the
kernel's; of (64, 16, 16, 32) to 64, 8.1 and 10.2, 7.4 and 14.6, 8.0 and 10.6; of (8, 7, 7, 512) to
512, 30 and 30, 35 and 80, 38 and 43. oneDNN, as PyTorch 2.13 has it, takes 7.1 and for both
gradients 16.6 of the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.errors import ShapeError
from allreduce.graph.core.op_table import NATIVE, Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Spec, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_shape
from allreduce.graph.ops.array.windows import Pair, Windows, windows_on, windows_shape
from allreduce.graph.ops.common import given_shape, promote_together
from allreduce.graph.trace.dispatch import apply

# Bytes of rows that are made at a time: with the kernel they stay in a level-2 cache.
_ROWS_BYTES = 1 << 20


def conv2d(
    x: Any,
    kernel: Any,
    strides: int | Pair = 1,
    padding: Any = "valid",
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Correlate images with a kernel.

    Args:
        x: `(batch, height, width, channels)`.
        kernel: `(height, width, channels / groups, filters)`.
        strides: From one window to the next, for both axes or as (height, width).
        padding: "valid", "same", or ((top, bottom), (left, right)): zeros around the images.
        dilation: From one tap of the kernel to the next.
        groups: How many parts the channels are cut into; each has its part of the filters.

    Returns:
        `(batch, windows, windows, filters)`.

    Raises:
        ShapeError: Images, kernel and groups do not fit each other, or the kernel is empty.
    """
    images, weights = promote_together(x, kernel)
    if weights.ndim != 4 or not all(isinstance(n, int) and n > 0 for n in weights.shape):
        raise ShapeError(
            f"{users_line()}: a kernel of conv2d is (height, width, channels / groups, filters), "
            f"not {show(weights.shape)}"
        )
    (parts,) = as_shape("the groups of conv2d", (groups,), smallest=1)
    size = weights.shape[:2]
    windows = windows_on("conv2d", images, size, strides, padding, dilation)
    return apply("conv2d", images, weights, windows=windows, groups=parts)


def _shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    x, kernel = specs
    channels, (*_, each, filters), groups = x.shape[3], kernel.shape, attrs["groups"]
    assert isinstance(filters, int)
    if channels != each * groups or filters % groups:
        raise ShapeError(
            f"images {show(x.shape)} and kernel {show(kernel.shape)} do not fit in {groups} "
            f"groups: expected a kernel (…, {channels} / {groups}, filters), filters a multiple "
            f"of {groups}"
        )
    return windows_shape(x, attrs["windows"], filters)


def _pieces(images: int, bytes_of_one: int) -> Iterator[slice]:
    """Cut a batch so that each piece's rows fit the cache, if the rows of one image do."""
    size = max(1, _ROWS_BYTES // max(1, bytes_of_one))
    return (slice(first, first + size) for first in range(0, images, size))


def _bands(windows: int, bytes_of_one: int) -> Iterator[tuple[slice, int]]:
    """Cut images with more into bands of windows, one below the other; yield also their heights."""
    size = max(1, _ROWS_BYTES // max(1, bytes_of_one))
    for first in range(0, windows, size):
        band = slice(first, min(first + size, windows))
        yield band, band.stop - first


def _rows(windows: Windows, x: np.ndarray, count: Pair) -> np.ndarray:
    """Return the windows' pixels of padded images, `(windows, taps * channels)`; a view if 1×1."""
    unfolded = windows.unfold(x, count)
    return unfolded.reshape(len(x) * count[0] * count[1], -1)


def _group(groups: int, g: int, channels: int) -> slice:
    each = channels // groups
    return slice(g * each, (g + 1) * each)


def _goes_native(attrs: Attrs, x: np.ndarray, kernel: np.ndarray, out: np.ndarray) -> bool:
    """Return whether native code is to do it: BLAS is as quick where there is nothing to copy."""
    copies = attrs["groups"] == 1 and kernel.shape[:2] != (1, 1)
    return copies and x.dtype in NATIVE and all(each.size for each in (x, kernel, out))


def _conv2d(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    x, kernel = inputs
    windows, groups = attrs["windows"], attrs["groups"]
    if _goes_native(attrs, x, kernel, out):
        images, weights = map(np.ascontiguousarray, inputs)
        _native.conv2d(out, images, weights, windows.numbers)
        return
    (height, width), filters = out.shape[1:3], out.shape[3]
    one = width * kernel[..., 0].nbytes
    for piece in _pieces(len(x), height * one):
        wide = windows.pad(x[piece], 0)
        for band, count in _bands(height, one):
            here = windows.below(wide, band.start)
            for g in range(groups):
                rows = _rows(windows, here[..., _group(groups, g, x.shape[3])], (count, width))
                mine = _group(groups, g, filters)
                weights = kernel[..., mine].reshape(-1, filters // groups)
                result = out[piece, band]
                if groups == 1:  # a view: images that are cut are alone
                    np.matmul(rows, weights, out=result.reshape(-1, filters))
                else:
                    result[..., mine] = (rows @ weights).reshape(*result.shape[:3], -1)


def _conv2d_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    images, kernel = x
    return [
        apply("conv2d_images", dy, kernel, **{**attrs, "shape": images.shape}),
        apply("conv2d_kernel", images, dy, **{**attrs, "shape": kernel.shape}),
    ]


def _images(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    """Sum the gradients of all windows at each pixel that they cover."""
    dy, kernel = inputs
    windows, groups, filters = attrs["windows"], attrs["groups"], dy.shape[3]
    turned = windows.turned()
    if turned is not None:
        back, weights = {"windows": turned, "groups": groups}, _turned(kernel, groups)
        # A convolution copies pixels of dy where the loop below adds to those of the images. In the
        # same run: 18.4 against 30.7 ms for 32 filters of 32 channels, 9.6 against 11.2 for 64 of
        # 32. Native code copies none.
        if filters <= 2 * out.shape[3] or _goes_native(back, dy, weights, out):
            _conv2d(out, [dy, weights], back)
            return
    (height, width), image = dy.shape[1:3], out.shape[1:3]
    one = width * kernel[..., 0].nbytes
    for piece in _pieces(len(out), height * one):
        wide = np.zeros((len(out[piece]), *windows.padded(image), out.shape[3]), out.dtype)
        for band, count in _bands(height, one):
            here = windows.below(wide, band.start)
            for g in range(groups):
                mine = _group(groups, g, filters)
                weights = kernel[..., mine].reshape(-1, filters // groups)
                part = dy[piece, band][..., mine].reshape(-1, filters // groups)
                rows = (part @ weights.T).reshape(len(wide), count, width, *windows.size, -1)
                target = here[..., _group(groups, g, out.shape[3])]
                for i, j, place in windows.taps((count, width)):
                    target[place] += rows[:, :, :, i, j]
        out[piece] = windows.inside(wide, image)


def _turned(kernel: np.ndarray, groups: int) -> np.ndarray:
    """Return the kernel that leads back: from filters to channels, and the other way round."""
    height, width, channels, filters = kernel.shape
    parts = kernel[::-1, ::-1].reshape(height, width, channels, groups, filters // groups)
    return parts.transpose(0, 1, 4, 3, 2).reshape(height, width, filters // groups, -1)


def _kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    x, dy = inputs
    windows, groups = attrs["windows"], attrs["groups"]
    if _goes_native(attrs, x, out, dy):
        images, gradients = map(np.ascontiguousarray, inputs)
        _native.conv2d_kernel(out, images, gradients, windows.numbers)
        return
    (height, width), filters = dy.shape[1:3], dy.shape[3]
    one = width * out[..., 0].nbytes
    out.fill(0)
    for piece in _pieces(len(x), height * one):
        wide = windows.pad(x[piece], 0)
        for band, count in _bands(height, one):
            here = windows.below(wide, band.start)
            for g in range(groups):
                rows = _rows(windows, here[..., _group(groups, g, x.shape[3])], (count, width))
                mine = _group(groups, g, filters)
                part = dy[piece, band][..., mine].reshape(-1, filters // groups)
                out[..., mine] += (rows.T @ part).reshape(*out.shape[:3], -1)


def _without_shape(attrs: Attrs) -> dict[str, Any]:
    return {"windows": attrs["windows"], "groups": attrs["groups"]}


# Each is linear in either input, so that their gradients are one another.
register("conv2d", _shape, _conv2d, _conv2d_gradient, is_product=True)
register(
    "conv2d_images",
    given_shape,
    _images,
    lambda dy, y, x, attrs: [
        apply("conv2d", dy, x[1], **_without_shape(attrs)),
        apply("conv2d_kernel", dy, x[0], **{**attrs, "shape": x[1].shape}),
    ],
    is_product=True,
)
register(
    "conv2d_kernel",
    given_shape,
    _kernel,
    lambda dy, y, x, attrs: [
        apply("conv2d_images", x[1], dy, **{**attrs, "shape": x[0].shape}),
        apply("conv2d", x[0], dy, **_without_shape(attrs)),
    ],
    is_product=True,
)
