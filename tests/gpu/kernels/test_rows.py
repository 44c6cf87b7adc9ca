"""Kernels of reductions, losses and dropout against NumPy in float64, and against the CPU's."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from cuda.bindings import driver

from allreduce import _native
from tests.gpu.kernels.calls import SUFFIXES, call, module, run

TOLERANCE = {"f32": 3e-6, "f64": 1e-13, "i32": 0, "i64": 0}


def drawn(suffix: str, *shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape) * 4
    return values.astype(SUFFIXES[suffix])


def sizes(*values: int) -> tuple[np.int64, ...]:
    return tuple(map(np.int64, values))


def axis(*shape: int, segment: int = 1 << 40) -> bytes:
    """Pack struct Axis of reduce.cu."""
    return struct.pack("@4q", *shape, min(segment, max(shape[1], 1)))


@pytest.mark.parametrize("suffix", ["f32", "f64", "i32", "i64"])
@pytest.mark.parametrize("shape", [(3, 1027, 1), (300, 5, 1), (2, 33, 7), (1, 1, 1), (5, 0, 1)])
def test_reductions(shape: tuple[int, int, int], suffix: str) -> None:
    x = drawn(suffix, *shape)
    outer, length, inner = shape
    out = np.empty((outer, inner), x.dtype)
    run("reduce", f"sum_to_{suffix}", out, x, axis(*shape), x.dtype.type(2), skip=1)
    scale = TOLERANCE[suffix] * max(length, 1)
    np.testing.assert_allclose(out, 2 * x.sum(1, dtype=float), 0, scale)
    if not length:
        return
    for name in ("max", "min"):
        run("reduce", f"{name}_{suffix}", out, x, axis(*shape))
        np.testing.assert_array_equal(out, getattr(x, name)(1))
    places = np.empty((outer, inner), np.int64)
    for name in ("argmax", "argmin"):
        run("reduce", f"{name}_{suffix}", places, x, *sizes(*shape))
        np.testing.assert_array_equal(places, getattr(np, name)(x, 1))


def test_nan_wins_reductions() -> None:
    x, out = drawn("f32", 2, 100), np.empty(2, np.float32)
    x[1, 63] = np.nan
    places = np.empty(2, np.int64)
    for name in ("max", "min"):
        run("reduce", f"{name}_f32", out, x, axis(2, 100, 1))
        np.testing.assert_array_equal(out, getattr(x, name)(1))
    run("reduce", "argmax_f32", places, x, *sizes(2, 100, 1))
    np.testing.assert_array_equal(places, x.argmax(1))


@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("segment", [1, 10, 99, 100])
def test_segments_of_an_axis(inner: int, segment: int) -> None:
    x = drawn("f32", 2, 100, inner)
    firsts = range(0, 100, segment)
    out = np.empty((2, len(firsts), inner), np.float32)
    run("reduce", "max_f32", out, x, axis(2, 100, inner, segment=segment))
    expected = [x[:, first : first + segment].max(1) for first in firsts]
    np.testing.assert_array_equal(out, np.stack(expected, 1))


def test_half_types_are_summed_in_float32() -> None:
    x = drawn("f32", 4, 999).astype(np.float16)
    out = np.empty(4, np.float16)
    run("reduce", "sum_to_f16", out, x, axis(4, 999, 1), np.float32(1))
    np.testing.assert_allclose(out, x.sum(1, dtype=float), 1e-3, 1e-3)


@pytest.mark.parametrize("suffix", ["f32", "f64"])
@pytest.mark.parametrize(("rows", "columns"), [(7, 10), (3, 1027), (5, 1), (0, 10)])
def test_softmax_and_losses(rows: int, columns: int, suffix: str) -> None:
    x = drawn(suffix, rows, columns)
    kind, shape = x.dtype, sizes(rows, columns)
    wide = x.astype(float)
    log_total = np.log(np.exp(wide).sum(1, keepdims=True))
    softmax, tolerance = np.exp(wide - log_total), 10 * TOLERANCE[suffix]
    out, per_row = np.empty_like(x), np.empty(rows, kind)
    run("loss", f"softmax_{suffix}", out, x, *shape, block=128)
    np.testing.assert_allclose(out, softmax, tolerance)
    run("loss", f"log_softmax_{suffix}", out, x, *shape, block=128)
    np.testing.assert_allclose(out, wide - log_total, 0, 20 * tolerance)

    labels = np.random.default_rng(1).integers(0, columns, rows).astype(np.int32)
    bad, dy = np.zeros(1, np.int32), drawn(suffix, rows, seed=2)
    one_hot = np.eye(columns)[labels]
    names = "sparse_cross_entropy", f"{suffix}_i32"
    run("loss", "_".join(names), per_row, labels, x, *shape, bad, block=128)
    expected = (log_total - wide)[np.arange(rows), labels]
    np.testing.assert_allclose(per_row, expected, 0, 20 * tolerance)
    run("loss", "_gradient_".join(names), out, dy, labels, x, *shape, bad, block=128)
    np.testing.assert_allclose(out, (softmax - one_hot) * dy[:, None], 0, 4 * tolerance)
    assert not bad[0]

    targets = np.abs(drawn(suffix, rows, columns, seed=3))
    run("loss", f"cross_entropy_{suffix}", per_row, targets, x, *shape, block=128)
    np.testing.assert_allclose(per_row, (targets * (log_total - wide)).sum(1), tolerance, tolerance)
    weight = targets.sum(1, keepdims=True, dtype=float)
    expected = (softmax * weight - targets) * dy[:, None]
    run("loss", f"cross_entropy_gradient_{suffix}", out, dy, targets, x, *shape, block=128)
    np.testing.assert_allclose(out, expected, 0, 20 * tolerance * max(1, columns / 10))


@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_outside_of_the_classes_is_reported_with_its_row(label: int) -> None:
    x, labels = drawn("f32", 7, 10), np.zeros(7, np.int64)
    labels[4] = label
    out, bad = np.empty(7, np.float32), np.zeros(1, np.int32)
    arguments = (out, labels, x, *sizes(7, 10), bad)
    run("loss", "sparse_cross_entropy_f32_i64", *arguments, block=128)
    assert bad[0] == 5
    np.testing.assert_array_equal(np.isnan(out), np.arange(7) == 4)


@pytest.mark.parametrize("columns", [1, 63, 64, 200])
def test_dropout_draws_the_bits_of_the_cpu(columns: int) -> None:
    rows, per_sample, rate, key, step = 6, 3, 0.3, 0x123456789ABCDEF, 41
    x = drawn("f32", rows, columns)
    out, expected = np.empty_like(x), np.empty_like(x)
    offset, number = np.array([1 << 33], np.int64), np.array([step], np.int64)
    more = (*sizes(per_sample, rows, columns), np.float64(rate), np.uint64(key))
    run("random", "dropout_f32", out, x, offset, number, *more)
    inputs = [x, np.array(1 << 33), np.array(step)]
    _native.run_rows("dropout", expected, inputs, [rate, key, per_sample])
    np.testing.assert_array_equal(out, expected)


def test_arrays_of_one_device_are_summed_in_their_order() -> None:
    inputs = [drawn("f32", 1027, seed=i) for i in range(3)]
    whole = np.stack(inputs)
    module("reduce")
    memory = int(call(driver.cuMemAlloc(whole.nbytes)))
    call(driver.cuMemcpyHtoD(memory, whole.ctypes.data, whole.nbytes))
    at = np.array([memory + i * inputs[0].nbytes for i in range(3)] + [0] * 5, np.uint64)
    out = np.empty(1027, np.float32)
    run("reduce", "sum_of_f32", out, at.tobytes(), np.int32(3), np.float64(0.5), np.int64(1027))
    call(driver.cuMemFree(memory))
    np.testing.assert_array_equal(out, (inputs[0] + inputs[1] + inputs[2]) / 2)
