"""Kernels of convolution, pooling, normalisation and deviates against NumPy in float64."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from allreduce.graph.ops.array.windows import Windows
from tests.gpu.kernels.calls import SUFFIXES, run

KINDS = ("f32", "f64")
TOLERANCE = {"f32": 1e-5, "f64": 1e-12}
# Odd sizes, strides and paddings; windows that leave pixels out; none.
CASES = [
    ((2, 5, 7, 3), Windows((3, 2), (2, 1), (1, 2), (1, 0), (1, 2))),
    ((3, 4, 4, 2), Windows((2, 2), (3, 2))),
    ((1, 6, 5, 4), Windows((3, 3), (1, 1), (1, 1), (2, 1), (1, 2))),
    ((0, 5, 5, 2), Windows((2, 2), (1, 1))),
]


def drawn(suffix: str, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(SUFFIXES[suffix])


def described(windows: Windows, shape: tuple[int, ...]) -> tuple[bytes, tuple[int, int]]:
    """Pack struct Windows of images.cu; return also the number of windows."""
    count = windows.count(shape[1:3])
    return struct.pack("@6q8i", *shape, *count, *windows.numbers[:8]), count


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize(("shape", "windows"), CASES)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_columns(shape: tuple[int, ...], windows: Windows, suffix: str, is_grouped: bool) -> None:
    groups = shape[3] if is_grouped else 1
    x, (how, count) = drawn(suffix, *shape), described(windows, shape)
    taps = windows.unfold(windows.pad(x, 0), count)  # (batch, windows, windows, taps, taps, c)
    grouped = taps.reshape(*taps.shape[:5], groups, shape[3] // groups).transpose(
        0, 1, 2, 5, 3, 4, 6
    )
    out = np.empty(grouped.shape, x.dtype)
    run("images", f"unfold_{x.itemsize}", out, x, np.int32(groups), how, skip=1)
    np.testing.assert_array_equal(out, grouped)
    wide = np.zeros((shape[0], *windows.padded(shape[1:3]), shape[3]))
    for i, j, place in windows.taps(count):
        wide[place] += taps[:, :, :, i, j]
    sums = np.empty_like(x)
    run("images", f"fold_{suffix}", sums, out, np.int32(groups), how)
    expected = windows.inside(wide, shape[1:3])
    np.testing.assert_allclose(sums, expected, TOLERANCE[suffix], TOLERANCE[suffix])


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize(("shape", "windows"), CASES)
def test_pooling(shape: tuple[int, ...], windows: Windows, suffix: str) -> None:
    x, (how, count) = np.round(drawn(suffix, *shape) * 2), described(windows, shape)
    dy = drawn(suffix, shape[0], *count, shape[3], seed=1)
    wide = windows.pad(x.astype(float), -np.inf)
    taps = np.stack([wide[place] for *_, place in windows.taps(count)], -1)
    largest, average = taps.max(-1), np.where(np.isinf(taps), 0, taps).sum(-1)
    average /= np.isfinite(taps).sum(-1)
    y, out, tolerance = np.empty_like(dy), np.empty_like(x), TOLERANCE[suffix]
    run("images", f"average_pool2d_{suffix}", y, x, how, skip=1)
    np.testing.assert_allclose(y, average, tolerance, tolerance)
    run("images", f"max_pool2d_{suffix}", y, x, how, skip=1)
    np.testing.assert_array_equal(y, largest)

    first, share = np.zeros_like(wide), np.zeros_like(wide)
    chosen = taps.argmax(-1)
    for tap, (*_, place) in enumerate(windows.taps(count)):
        first[place] += np.where(chosen == tap, dy, 0)
        share[place] += dy / np.isfinite(taps).sum(-1)
    run("images", f"max_pool2d_gradient_{suffix}", out, dy, x, y, how)
    np.testing.assert_allclose(out, windows.inside(first, shape[1:3]), tolerance, tolerance)
    run("images", f"average_pool2d_gradient_{suffix}", out, dy, how)
    np.testing.assert_allclose(out, windows.inside(share, shape[1:3]), tolerance, tolerance)
    u, picked = drawn(suffix, *shape, seed=2), np.empty_like(dy)
    run("images", f"max_pool2d_chosen_{suffix}", picked, u, x, y, how)
    spread = windows.pad(u, 0)
    parts = np.stack([spread[place] for *_, place in windows.taps(count)], -1)
    expected = np.take_along_axis(parts, chosen[..., None], -1)[..., 0]
    np.testing.assert_array_equal(picked, expected)


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize("shape", [(5, 33, 1), (1, 300, 7), (2, 3, 5), (3, 1, 2), (0, 4, 1)])
def test_normalisation(shape: tuple[int, int, int], suffix: str) -> None:
    x, dy, epsilon = drawn(suffix, *shape) * 3 + 1, drawn(suffix, *shape, seed=1), 1e-3
    out, sizes = np.empty_like(x), tuple(map(np.int64, shape))
    run("normalize", f"normalize_{suffix}", out, x, *sizes, np.float64(epsilon), skip=1)
    centred = x - x.mean(1, keepdims=True, dtype=float)
    deviation = np.sqrt(np.square(centred).mean(1, keepdims=True) + epsilon)
    tolerance = 4 * TOLERANCE[suffix]
    y = centred / deviation
    np.testing.assert_allclose(out, y, tolerance, tolerance)
    run("normalize", f"normalize_gradient_{suffix}", out, dy, x, out.copy(), *sizes,
        np.float64(epsilon))  # fmt: skip
    along = (dy * y).mean(1, keepdims=True)
    expected = (dy - dy.mean(1, keepdims=True, dtype=float) - y * along) / deviation
    np.testing.assert_allclose(out, expected, tolerance, tolerance)


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize("n", [0, 1, 1027])
def test_deviates_are_those_of_numpy(n: int, suffix: str) -> None:
    key, step, offset, unit = (1 << 63) + 12345, 7, 3, 5
    start, number = np.array([offset]), np.array([step])
    generator = np.random.Generator(np.random.Philox(key=np.array([key, step], np.uint64)))
    numbers = generator.random(2 * (offset * unit + n))
    out: np.ndarray = np.empty(n, SUFFIXES[suffix])
    more, last = (start, number, np.int64(unit), np.int64(n)), np.uint64(key)
    low, width, most = np.float64(-1), np.float64(3), np.float64(1.5)
    run("random", f"uniform_{suffix}", out, *more, low, width, most, last, skip=1)
    first = offset * unit
    expected = np.minimum(-1 + 3 * numbers[first : first + n], 1.5)
    np.testing.assert_allclose(out, expected, TOLERANCE[suffix], TOLERANCE[suffix])
    run("random", f"normal_{suffix}", out, *more, np.float64(1), np.float64(2), last)
    pairs = numbers[2 * first :].reshape(-1, 2)
    radius = np.sqrt(-2 * np.log1p(-pairs[:, 0]))
    expected = 1 + 2 * radius * np.cos(2 * np.pi * pairs[:, 1])
    np.testing.assert_allclose(out, expected, TOLERANCE[suffix], TOLERANCE[suffix])
