"""Kernels of indices and rows against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.kernels.calls import CONTIGUOUS, SUFFIXES, run, struct_of

INDICES = {"i32": np.int32, "i64": np.int64}
BYTES = {1: np.uint8, 2: np.uint16, 4: np.float32, 8: np.float64}


def sizes(*values: int) -> tuple[np.int64, ...]:
    return tuple(map(np.int64, values))


def drawn(kind: Any, *shape: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape) * 50).astype(kind)


def indices(kind: Any, size: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(-size, size, shape).astype(kind)


@pytest.mark.parametrize("suffix", INDICES)
@pytest.mark.parametrize(("nbytes", "skip"), [(1, 3), (2, 1), (4, 0), (8, 1)])
@pytest.mark.parametrize(("before", "count", "after"), [(1, 300, 7), (3, 5, 1), (2, 0, 3)])
def test_take(before: int, count: int, after: int, nbytes: int, skip: int, suffix: str) -> None:
    x, at = drawn(BYTES[nbytes], before, 11, after), indices(INDICES[suffix], 11, count)
    out, bad = np.empty((before, count, after), x.dtype), np.zeros(1, np.int32)
    shape = sizes(before, count, 11, after)
    run("gather", f"take_{nbytes}_{suffix}", out, x, at, *shape, np.int32(1), bad, skip=skip)
    np.testing.assert_array_equal(out, np.take(x, at, 1))
    each = indices(INDICES[suffix], 11, before, count, after)
    run("gather", f"take_along_axis_{nbytes}_{suffix}", out, x, each, *shape, bad, skip=skip)
    np.testing.assert_array_equal(out, np.take_along_axis(x, each.astype(np.int64) % 11, 1))
    assert not bad[0]


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("suffix", ["f32", "f64"])
@pytest.mark.parametrize(("before", "count", "after"), [(1, 300, 7), (3, 5, 1), (2, 0, 3)])
def test_sums_at_indices(before: int, count: int, after: int, suffix: str, index: str) -> None:
    kind, shape = SUFFIXES[suffix], sizes(before, count, 11, after)
    dy, at = drawn(kind, before, count, after), indices(INDICES[index], 11, count)
    bad, chain = np.zeros(1, np.int32), np.empty((2, count), np.int32)
    run("gather", f"link_{index}", chain[0], chain[1], at, *sizes(count, 11), bad)
    out: np.ndarray = np.zeros((before, 11, after), kind)
    expected = np.zeros(out.shape)
    run("gather", f"scatter_add_{suffix}_{index}", out, dy, at, *chain, *shape, skip=1)
    for k, place in enumerate(at):
        expected[:, place] += dy[:, k]
    np.testing.assert_allclose(out, expected, 1e-5, 1e-4)
    each = indices(INDICES[index], 11, before, count, after).astype(INDICES[index])
    out[...], expected[...] = 0, 0
    run("gather", f"add_along_axis_{suffix}_{index}", out, dy, each, *shape, bad)
    for (i, k, j), place in np.ndenumerate(each):
        expected[i, place, j] += dy[i, k, j]
    np.testing.assert_allclose(out, expected, 1e-5, 1e-4)
    assert not bad[0]


@pytest.mark.parametrize("wrong", [-12, 11])
def test_an_index_out_of_range_is_reported_and_gives_nan(wrong: int) -> None:
    x, at, bad = drawn(np.float32, 11), np.arange(5), np.zeros(1, np.int32)
    at[3], out = wrong, np.empty(5, np.float32)
    run("gather", "take_4_i64", out, x, at, *sizes(1, 5, 11, 1), np.int32(1), bad)
    np.testing.assert_array_equal(np.isnan(out), np.arange(5) == 3)
    assert bad[0] == 4
    chain, sums = np.empty((2, 5), np.int32), np.zeros(11, np.float32)
    bad[0] = 0
    run("gather", "link_i64", chain[0], chain[1], at, *sizes(5, 11), bad)
    dy = np.ones(5, np.float32)
    run("gather", "scatter_add_f32_i64", sums, dy, at, *chain, *sizes(1, 5, 11, 1))
    assert bad[0] == 4
    assert sums.sum() == 4


@pytest.mark.parametrize("suffix", ["f32", "f64", "i32", "i64"])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_one_hot_and_the_largest(rows: int, suffix: str) -> None:
    labels, bad = np.arange(rows, dtype=np.int32) * 5 % 7, np.zeros(1, np.int32)
    out: np.ndarray = np.empty((rows, 7), SUFFIXES[suffix])
    run("gather", f"one_hot_{suffix}_i32", out, labels, *sizes(rows, 7), bad, skip=1)
    np.testing.assert_array_equal(out, np.eye(7)[labels])
    x: np.ndarray = np.round(drawn(float, rows, 9) / 20).astype(SUFFIXES[suffix])
    if x.dtype.kind == "f" and rows:
        x[0, 4] = np.nan
    found = np.empty((rows, 4), np.int64)
    run("gather", f"top_k_indices_{suffix}", found, x, *sizes(rows, 9, 4))
    for row, places in zip(x, found, strict=True):
        order = np.argsort(row[::-1], kind="stable")[::-1]
        np.testing.assert_array_equal(places, 8 - order[:4])
    flat = np.nan_to_num(x.reshape(-1))
    order = np.empty(flat.size, np.int64)
    run("gather", f"order_{suffix}", order, flat, *sizes(flat.size))
    np.testing.assert_array_equal(order, np.argsort(flat, kind="stable"))


@pytest.mark.parametrize("nbytes", BYTES)
def test_rows_of_a_replica_and_copies_into_gaps(nbytes: int) -> None:
    x, start = drawn(BYTES[nbytes], 9, 3), np.array([2])
    own = np.empty((4, 3), x.dtype)
    run("gather", f"own_rows_{nbytes}", own, x, start, *sizes(6, 12))
    np.testing.assert_array_equal(own, x[4:8])
    back = np.empty_like(x)
    run("gather", f"among_rows_{nbytes}", back, own, start, *sizes(6, 12, 27))
    expected = np.zeros_like(x)
    expected[4:8] = own
    np.testing.assert_array_equal(back, expected)
    wide = np.zeros((4, 7), x.dtype)
    how = struct_of(2, [4, 3], [[3, 1], [7, 2]])
    run("copy", f"place_{nbytes}", wide, own, *sizes(12), how)
    np.testing.assert_array_equal(wide[:, 0:5:2], own)
    run("copy", f"place_{nbytes}", own, x[:4].copy(), *sizes(12), CONTIGUOUS, skip=1)
    np.testing.assert_array_equal(own, x[:4])


@pytest.mark.parametrize("suffix", ["f32", "f64", "i32", "i64"])
@pytest.mark.parametrize("shape", [(3, 57, 1), (2, 5, 7), (3, 0, 1)])
@pytest.mark.parametrize("is_reversed", [0, 1])
def test_cumulative_sums(shape: tuple[int, int, int], suffix: str, is_reversed: int) -> None:
    x = drawn(SUFFIXES[suffix], *shape)
    out, step = np.empty_like(x), -1 if is_reversed else 1
    run("reduce", f"cumsum_{suffix}", out, x, *sizes(*shape), np.int32(is_reversed), skip=1)
    expected = x.astype(float)[:, ::step].cumsum(1)[:, ::step]
    np.testing.assert_allclose(out, expected, 2e-6, 1e-4)
