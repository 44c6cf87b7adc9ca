"""Convolution and pooling in native code, beside the same by columns and taps, at every level."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from allreduce import _native
from allreduce.graph.ops.array.windows import Windows
from allreduce.graph.ops.nn import convolution, pooling

RANDOM = np.random.default_rng(5)
IMAGE = (11, 13)
LAID = [
    Windows(size, strides, dilation, before, after)
    for size, strides, dilation, (before, after) in itertools.product(
        ((1, 2), (3, 3), (2, 4)),
        ((1, 1), (2, 3)),
        ((1, 1), (2, 2), (1, 3)),
        (((0, 0), (0, 0)), ((1, 0), (0, 2)), ((2, 2), (1, 1))),
    )
]


@pytest.fixture(params=range(3), ids=["baseline", "avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    if not _native.use_level(request.param):
        pytest.skip("this processor lacks it")
    yield request.param
    _native.use_level(-1)


def _whole(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draw whole numbers, so that sums are exact."""
    return RANDOM.integers(-3, 4, shape).astype(dtype)


def _in_python(
    kernel: Any, like: np.ndarray, inputs: list[np.ndarray], attrs: dict[str, Any]
) -> np.ndarray:
    out = np.empty_like(like)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "NATIVE", ())
        kernel(out, inputs, attrs)
    return out


def _largest(x: np.ndarray, windows: Windows) -> np.ndarray:
    """Compute max-pooling tap by tap."""
    wide, count = windows.pad(x, -np.inf), windows.count(x.shape[1:3])
    largest: np.ndarray = np.max([wide[place] for _, _, place in windows.taps(count)], axis=0)
    return largest


def _gradient_of_largest(
    dy: np.ndarray, x: np.ndarray, y: np.ndarray, windows: Windows
) -> np.ndarray:
    """Add each gradient to the first of its window's largest pixels, tap by tap."""
    wide = windows.pad(x, -np.inf)
    result, left = np.zeros_like(wide), np.ones(dy.shape, bool)
    for _, _, place in windows.taps(windows.count(x.shape[1:3])):
        here = (wide[place] == y) & left
        result[place] += np.where(here, dy, 0)
        left &= ~here
    return windows.inside(result, x.shape[1:3])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("channels", "filters"), [(1, 1), (3, 5), (7, 17), (32, 37)])
def test_convolution_and_its_gradients(level: int, dtype: str, channels: int, filters: int) -> None:
    for each in LAID:
        attrs = {"windows": each, "groups": 1}
        x = _whole((3, *IMAGE, channels), dtype)
        kernel = _whole((*each.size, channels, filters), dtype)
        dy = _whole((3, *each.count(IMAGE), filters), dtype)
        for act, like, inputs in (
            (convolution._conv2d, dy, [x, kernel]),
            (convolution._images, x, [dy, kernel]),
            (convolution._kernel, kernel, [x, dy]),
        ):
            found = np.full_like(like, 7)
            act(found, inputs, attrs)
            expected = _in_python(act, like, inputs, attrs)
            np.testing.assert_array_equal(found, expected, f"{act.__name__} {each}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("channels", [1, 17, 32])
def test_pooling_and_its_gradient(level: int, dtype: str, channels: int) -> None:
    for each in [Windows((1, 1), (1, 1)), Windows((11, 13), (11, 13)), *LAID]:
        count = each.count(IMAGE)
        if each.miss(IMAGE, count):
            continue
        attrs = {"windows": each}
        x = _whole((2, *IMAGE, channels), dtype)  # of few numbers, so that some are equal
        y, dy = (_whole((2, *count, channels), dtype) for _ in range(2))
        pooling._max(y, [x], attrs)
        np.testing.assert_array_equal(y, _largest(x, each), str(each))
        given = np.full_like(x, 7)
        pooling._max_gradient(given, [dy, x, y], attrs)
        expected = _gradient_of_largest(dy, x, y, each)
        np.testing.assert_array_equal(given, expected, str(each))


def test_strided_inputs_are_taken() -> None:
    laid = Windows((3, 3), (1, 1))
    x, kernel = _whole((3, 4, *IMAGE), "float32"), _whole((3, 3, 4, 5), "float32")
    attrs = {"windows": laid, "groups": 1}
    turned, out = x.transpose(0, 2, 3, 1), np.empty((3, *laid.count(IMAGE), 5), np.float32)
    convolution._conv2d(out, [turned, kernel], attrs)
    np.testing.assert_array_equal(
        out, _in_python(convolution._conv2d, out, [turned.copy(), kernel], attrs)
    )


def test_a_nan_is_the_largest_wherever_it_stands(level: int) -> None:
    x = np.zeros((1, 2, 8, 20), np.float32)
    for place in range(4):  # of a window
        x[0, place // 2, 2 * place + place % 2] = np.nan
    y = np.empty((1, 1, 4, 20), np.float32)
    pooling._max(y, [x], {"windows": Windows((2, 2), (2, 2))})
    assert np.isnan(y).all()


def test_windows_of_nothing_but_minus_infinity_give_their_gradient_to_the_first_pixel() -> None:
    x = np.full((1, 3, 3, 1), -np.inf, np.float32)
    laid = Windows((2, 2), (2, 2), before=(1, 1))
    y, found = np.empty((1, 2, 2, 1), np.float32), np.empty_like(x)
    pooling._max(y, [x], {"windows": laid})
    pooling._max_gradient(found, [np.ones_like(y), x, y], {"windows": laid})
    np.testing.assert_array_equal(found[0, ..., 0], [[1, 1, 0], [1, 1, 0], [0, 0, 0]])


def test_sizes_that_do_not_fit_are_refused() -> None:
    x, kernel = np.zeros((1, 5, 5, 3), np.float32), np.zeros((3, 3, 3, 4), np.float32)
    numbers = Windows((3, 3), (1, 1)).numbers
    for out in ((1, 4, 3, 4), (1, 3, 3, 5), (2, 3, 3, 4)):
        with pytest.raises(ValueError, match="do not fit"):
            _native.conv2d(np.zeros(out, np.float32), x, kernel, numbers)
    with pytest.raises(ValueError, match="do not fit"):
        _native.max_pool2d(np.zeros((1, 4, 3, 3), np.float32), x, numbers)


def test_the_kernels_gradient_keeps_its_digits_over_many_pixels(level: int) -> None:
    """Positive numbers, of which a single running sum would lose one digit after the other."""
    generator = np.random.default_rng(0)
    x = generator.random((32, 128, 128, 1), np.float32)
    dy = generator.random((32, 128, 128, 1), np.float32)
    found = np.empty((1, 1, 1, 1), np.float32)
    exact = float((x.astype(np.float64) * dy).sum())
    convolution._kernel(found, [x, dy], {"windows": Windows((1, 1), (1, 1)), "groups": 1})
    assert abs(float(found[0, 0, 0, 0]) / exact - 1) < 1e-5
