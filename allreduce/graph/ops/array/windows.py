"""Windows that slide over images `(batch, height, width, channels)`: sizes, padding, taps.

A tap is one place inside the window; all windows' pixels at a tap are one strided slice of the
padded image. Source of the sizes: Dumoulin and Visin, "A guide to convolution arithmetic for deep
learning" (2016), sections 2 and 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError, unknown_name
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Spec, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_shape

Pair = tuple[int, int]
PADDINGS = ("valid", "same")


@dataclass(frozen=True, slots=True)
class Windows:
    """How windows lie on an image; all pairs are (height, width).

    Attributes:
        size: Taps of a window.
        strides: From one window to the next.
        dilation: From one tap to the next.
        before: Rows and columns that are put in front of the image.
        after: And behind it.
        same: Whether both follow from the image's size, by "same".
    """

    size: Pair
    strides: Pair
    dilation: Pair = (1, 1)
    before: Pair = (0, 0)
    after: Pair = (0, 0)
    same: bool = False

    @property
    def is_padded(self) -> bool:
        return any(self.before + self.after)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All pairs, as native kernels take them."""
        return (*self.size, *self.strides, *self.dilation, *self.before, *self.after)

    def padded(self, image: Sequence[int]) -> Pair:
        """Return the size of the padded image."""
        return (
            image[0] + self.before[0] + self.after[0],
            image[1] + self.before[1] + self.after[1],
        )

    def count(self, image: Sequence[int]) -> Pair:
        """Return how many windows fit an image of `(height, width)`."""
        found = []
        for size, stride, dilation, length in zip(
            self.size, self.strides, self.dilation, self.padded(image), strict=True
        ):
            reach = (size - 1) * dilation + 1
            if length < reach:
                raise ShapeError(
                    f"windows of {_by(self.size)}"
                    f"{f' with dilation {_by(self.dilation)}' if max(self.dilation) > 1 else ''} "
                    f"do not fit images of {_by(tuple(image))}; use smaller ones, or "
                    "padding='same'"
                )
            found.append((length - reach) // stride + 1)
        return found[0], found[1]

    def miss(self, image: Sequence[Any], count: Sequence[Any]) -> bool:
        """Return whether some of so many windows lie in the padding alone."""
        return any(
            size <= before or (windows - 1) * stride >= before + length
            for size, stride, before, length, windows in zip(
                self.size, self.strides, self.before, image, count, strict=True
            )
        )

    def turned(self) -> Windows | None:
        """Return the windows over the output that lead back to the image, if strides are 1.

        Source: Dumoulin and Visin, section 4.2. None if there are no such windows.
        """
        reach = [(size - 1) * gap for size, gap in zip(self.size, self.dilation, strict=True)]
        before = reach[0] - self.before[0], reach[1] - self.before[1]
        after = reach[0] - self.after[0], reach[1] - self.after[1]
        if self.strides != (1, 1) or min(before + after) < 0:
            return None
        return Windows(self.size, (1, 1), self.dilation, before, after)

    def taps(self, count: Pair) -> Iterator[tuple[int, int, tuple[slice, slice, slice]]]:
        """Yield each tap's place in the window, and where in padded images it is."""
        for i in range(self.size[0]):
            for j in range(self.size[1]):
                place = (slice(None), self._along(0, i, count[0]), self._along(1, j, count[1]))
                yield i, j, place

    def _along(self, axis: int, tap: int, count: int) -> slice:
        first = tap * self.dilation[axis]
        return slice(first, first + (count - 1) * self.strides[axis] + 1, self.strides[axis])

    def pad(self, x: np.ndarray, value: float) -> np.ndarray:
        """Surround images with a value; a view where nothing is to be put around them."""
        if not self.is_padded:
            return x
        height, width = self.padded(x.shape[1:3])
        wide = np.full((len(x), height, width, x.shape[3]), value, x.dtype)
        self.inside(wide, x.shape[1:3])[...] = x
        return wide

    def inside(self, wide: np.ndarray, image: Sequence[int]) -> np.ndarray:
        """Return the view of the image in a padded one."""
        top, left = self.before
        return wide[:, top : top + image[0], left : left + image[1]]

    def below(self, wide: np.ndarray, row: int) -> np.ndarray:
        """Return the view of padded images from the windows of a row on."""
        return wide[:, row * self.strides[0] :]

    def unfold(self, x: np.ndarray, count: Pair) -> np.ndarray:
        """Return a view of padded images as `(batch, windows, windows, height, width, channels)`.

        Pixels are there as often as windows cover them.
        """
        batch, row, column, channel = x.strides
        shape = (len(x), *count, *self.size, x.shape[3])
        strides = (
            *(batch, row * self.strides[0], column * self.strides[1]),
            *(row * self.dilation[0], column * self.dilation[1], channel),
        )
        return np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)


def windows_on(
    what: str, x: Tensor, size: Any, strides: Any, padding: Any, dilation: Any = 1
) -> Windows:
    """Read how windows are to lie on images.

    Args:
        what: The operator's name, for errors.
        x: `(batch, height, width, channels)`; height and width are known.
        size: An integer, or (height, width); as are strides and dilation.
        strides: As size.
        padding: "valid": none; "same": so that with strides of 1 the result is as large as the
            image, the odd row or column behind it; or ((top, bottom), (left, right)).
        dilation: As size.
    """
    image = _image(what, x)
    sizes = as_pair(f"the size of {what}", size)
    steps = as_pair(f"the strides of {what}", strides)
    gaps = as_pair(f"the dilation of {what}", dilation)
    before, after = _padding(what, padding, image, Windows(sizes, steps, gaps))
    same = isinstance(padding, str) and padding == "same"
    return Windows(sizes, steps, gaps, before, after, same)


def _image(what: str, x: Tensor) -> Pair:
    if x.ndim == 4:
        _, height, width, channels = x.shape
        if isinstance(height, int) and isinstance(width, int) and isinstance(channels, int):
            return height, width
    raise ShapeError(
        f"{users_line()}: {what} takes images (batch, height, width, channels), of known size, "
        f"not {show(x.shape)}"
    )


def as_pair(what: str, value: Any) -> Pair:
    """Read one positive integer for both axes, or two."""
    sizes = as_shape(what, value, smallest=1)
    if len(sizes) not in (1, 2) or not all(isinstance(size, int) for size in sizes):
        raise ShapeError(f"{users_line()}: {what} is one integer or a pair, not {value!r:.60}")
    first, last = sizes[0], sizes[-1]
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last


def _padding(what: str, padding: Any, image: Pair, windows: Windows) -> tuple[Pair, Pair]:
    if isinstance(padding, str):
        if padding not in PADDINGS:
            raise unknown_name(f"padding of {what}", padding, PADDINGS)
        if padding == "valid":
            return (0, 0), (0, 0)
        missing = []
        for length, size, stride, dilation in zip(
            image, windows.size, windows.strides, windows.dilation, strict=True
        ):
            reach = ((length + stride - 1) // stride - 1) * stride + (size - 1) * dilation + 1
            missing.append(max(0, reach - length))
        before = (missing[0] // 2, missing[1] // 2)
        return before, (missing[0] - before[0], missing[1] - before[1])
    try:
        (top, bottom), (left, right) = ((index(a), index(b)) for a, b in padding)
    except (TypeError, ValueError):
        raise UsageError(
            f"{users_line()}: the padding of {what} is 'valid', 'same' or "
            f"((top, bottom), (left, right)), not {padding!r:.60}"
        ) from None
    if min(top, bottom, left, right) < 0:
        raise ShapeError(f"{users_line()}: the padding of {what} is not negative: {padding!r:.60}")
    return (top, left), (bottom, right)


def windows_shape(spec: Spec, windows: Windows, channels: int) -> Spec:
    """Return the spec of one value per window and channel."""
    _, height, width, _ = spec.shape
    assert isinstance(height, int)
    assert isinstance(width, int)
    return Spec((spec.shape[0], *windows.count((height, width)), channels), spec.dtype)


def _by(pair: tuple[int, ...]) -> str:
    return "×".join(map(str, pair))
