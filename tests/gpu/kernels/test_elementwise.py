"""Element-wise kernels, copies, casts and fills against NumPy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from tests.gpu.kernels.calls import CONTIGUOUS, SUFFIXES, run, struct_of

SIZES = (0, 1, 5, 1027)
UNARY: dict[str, Callable[[Any], Any]] = {
    "negative": np.negative,
    "absolute": np.absolute,
    "sign": np.sign,
    "square": np.square,
    "floor": np.floor,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.where(x < 0, 0, x),
}
OF_POSITIVE = ("log", "log1p", "sqrt")
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "divide": np.divide,
    "floor_divide": np.floor_divide,
    "remainder": np.remainder,
    "power": lambda x, y: np.power(np.abs(x), y),
    "relu_gradient": lambda x, y: np.where(y > 0, x, 0),
}
COMPARE = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
OF_INTEGERS = (
    *("negative", "absolute", "sign", "square"),
    *("add", "subtract", "multiply", "maximum", "minimum", "floor_divide", "remainder"),
)
TOLERANCE = {"f32": 2e-6, "f64": 1e-13, "i32": 0, "i64": 0}


def cases(names: Iterable[str]) -> list[tuple[str, str]]:
    floats = [(name, suffix) for name in names for suffix in ("f32", "f64")]
    whole = [name for name in names if name in OF_INTEGERS]
    return floats + [(name, suffix) for name in whole for suffix in ("i32", "i64")]


def drawn(suffix: str, n: int, seed: int = 0) -> np.ndarray:
    """Draw values; those of floats hold a zero, and few are equal to another draw's."""
    values = np.random.default_rng(seed).standard_normal(n) * 4
    values[: n // 7] = np.round(values[: n // 7])
    return values.astype(SUFFIXES[suffix])


def close(got: np.ndarray, expected: np.ndarray, suffix: str) -> None:
    np.testing.assert_allclose(
        got.astype(float), expected.astype(float), TOLERANCE[suffix], TOLERANCE[suffix]
    )


@pytest.mark.parametrize(("name", "suffix"), cases(UNARY))
def test_functions_of_one_operand(name: str, suffix: str) -> None:
    for n in SIZES:
        x = drawn(suffix, n)
        x = np.abs(x) + x.dtype.type(1) if name in OF_POSITIVE else x
        out = np.empty_like(x)
        run("elementwise", f"{name}_{suffix}", out, x, np.int64(n), CONTIGUOUS, skip=n % 2)
        close(out, UNARY[name](x.astype(float)), suffix)


@pytest.mark.parametrize(("name", "suffix"), cases(BINARY))
def test_functions_of_two_operands(name: str, suffix: str) -> None:
    for n in SIZES:
        x, y = drawn(suffix, n), drawn(suffix, n, 1)
        x = np.abs(x) + SUFFIXES[suffix](1) if name == "power" else x
        if name in ("divide", "floor_divide", "remainder"):
            y = np.copysign(np.abs(y) + 20, y).astype(x.dtype)
        out = np.empty_like(x)
        run("elementwise", f"{name}_{suffix}", out, x, y, np.int64(n), CONTIGUOUS)
        tolerance = 40 if name == "power" else 1
        expected = BINARY[name](x.astype(float), y.astype(float))
        np.testing.assert_allclose(out.astype(float), expected, tolerance * TOLERANCE[suffix])


@pytest.mark.parametrize("suffix", ["f32", "f64", "i32", "i64"])
@pytest.mark.parametrize("name", COMPARE)
def test_comparisons(name: str, suffix: str) -> None:
    x, y = np.round(drawn(suffix, 1027)), np.round(drawn(suffix, 1027, 1))
    out = np.empty(1027, bool)
    run("elementwise", f"{name}_{suffix}", out, x, y, np.int64(1027), CONTIGUOUS)
    np.testing.assert_array_equal(out, getattr(np, name)(x, y))


def test_nan_passes_relu_and_wins_a_maximum() -> None:
    x = np.array([np.nan, -1, 2], np.float32)
    y, out = np.array([1, np.nan, 1], np.float32), np.empty(3, np.float32)
    run("elementwise", "relu_f32", out, x, np.int64(3), CONTIGUOUS)
    np.testing.assert_array_equal(out, [np.nan, 0, 2])
    for name in ("maximum", "minimum"):
        run("elementwise", f"{name}_f32", out, x, y, np.int64(3), CONTIGUOUS)
        np.testing.assert_array_equal(out, getattr(np, name)(x, y))


def test_logical_functions() -> None:
    x, y = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    out = np.empty(4, bool)
    for name in ("logical_and", "logical_or"):
        run("elementwise", f"{name}_b8", out, x, y, np.int64(4), CONTIGUOUS)
        np.testing.assert_array_equal(out, getattr(np, name)(x, y))
    run("elementwise", "logical_not_b8", out, x, np.int64(4), CONTIGUOUS)
    np.testing.assert_array_equal(out, ~x)


def test_functions_of_bits() -> None:
    for kind, suffix in ((np.int32, "i32"), (np.int64, "i64"), (bool, "b8")):
        x: np.ndarray = np.random.default_rng(0).integers(-9, 9, 37).astype(kind)
        y: np.ndarray = np.random.default_rng(1).integers(-9, 9, 37).astype(kind)
        out = np.empty_like(x)
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
            run("elementwise", f"{name}_{suffix}", out, x, y, np.int64(37), CONTIGUOUS)
            np.testing.assert_array_equal(out, getattr(np, name)(x, y))
        run("elementwise", f"invert_{suffix}", out, x, np.int64(37), CONTIGUOUS)
        np.testing.assert_array_equal(out, ~x)
    run("elementwise", "logical_xor_b8", out, x, y, np.int64(37), CONTIGUOUS)
    np.testing.assert_array_equal(out, x ^ y)


@pytest.mark.parametrize("suffix", ["f32", "f64"])
def test_functions_of_special_numbers(suffix: str) -> None:
    x: np.ndarray = np.array([0, -0.0, 1, -np.inf, np.inf, np.nan, 1e-40, 3e38], SUFFIXES[suffix])
    out = np.empty(x.size, bool)
    for name in ("isnan", "isinf", "isfinite"):
        run("elementwise", f"{name}_{suffix}", out, x, np.int64(x.size), CONTIGUOUS)
        np.testing.assert_array_equal(out, getattr(np, name)(x))
    y, got = np.array([3, 3, 0, 2, -2, 2, -2, -7], x.dtype), np.empty_like(x)
    for name in ("floor_divide", "remainder"):
        run("elementwise", f"{name}_{suffix}", got, x, y, np.int64(x.size), CONTIGUOUS)
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(got, getattr(np, name)(x, y), 1e-6)


@pytest.mark.parametrize("suffix", ["i32", "i64"])
def test_integers_divided_by_nothing_are_nothing(suffix: str) -> None:
    x: np.ndarray = np.array([5, -7, 0], SUFFIXES[suffix])
    y: np.ndarray = np.array([0, -1, 0], SUFFIXES[suffix])
    out = np.empty_like(x)
    run("elementwise", f"floor_divide_{suffix}", out, x, y, np.int64(3), CONTIGUOUS)
    np.testing.assert_array_equal(out, [0, 7, 0])


def test_inputs_broadcast() -> None:
    x, bias = drawn("f32", 35).reshape(5, 7), drawn("f32", 7, 1)
    out = np.empty_like(x)
    how = struct_of(2, [5, 7], [[7, 1], [0, 1]])
    run("elementwise", "add_f32", out, x, bias, np.int64(35), how)
    np.testing.assert_array_equal(out, x + bias)
    column = drawn("f32", 5, 2).reshape(5, 1)
    how = struct_of(2, [5, 7], [[1, 0], [7, 1], [0, 1]])
    run("elementwise", "where_f32", out, column > 0, x, bias, np.int64(35), how)
    np.testing.assert_array_equal(out, np.where(column > 0, x, bias))


def test_clip() -> None:
    x, out = drawn("f32", 1027), np.empty(1027, np.float32)
    low, high = np.float32(-1), np.float32(2)
    run("elementwise", "clip_f32", out, x, low, high, np.int64(1027), CONTIGUOUS)
    np.testing.assert_array_equal(out, np.clip(x, low, high))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_copies_of_transposed_arrays_and_fills(size: int) -> None:
    kind = np.dtype(f"u{size}")
    x = np.arange(3 * 5 * 7).astype(kind).reshape(3, 5, 7)
    out: np.ndarray = np.empty((7, 3, 5), kind)
    how = struct_of(3, [7, 3, 5], [[1, 35, 7]])
    run("copy", f"copy_{size}", out, x, np.int64(out.size), how)
    np.testing.assert_array_equal(out, x.transpose(2, 0, 1))
    run("copy", f"fill_{size}", out, kind.type(91), np.int64(out.size - 1))
    assert (out.flat[:-1] == 91).all()
    assert out.flat[-1] == x[2, 4, 6]


@pytest.mark.parametrize(("start", "to"), list(permutations(SUFFIXES, 2)))
def test_casts(start: str, to: str) -> None:
    x = drawn(start, 1027)
    out: np.ndarray = np.empty(1027, SUFFIXES[to])
    run("copy", f"cast_{start}_{to}", out, x, np.int64(1027), CONTIGUOUS)
    np.testing.assert_array_equal(out, x.astype(SUFFIXES[to]))


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int16, np.uint16, np.uint32])
def test_narrow_integers_become_indices(kind: Any) -> None:
    x = np.random.default_rng(0).integers(0, 255, 37).astype(kind)
    out, name = np.empty(37, np.int64), f"{x.dtype.kind}{8 * x.itemsize}"
    run("copy", f"cast_{name}_i64", out, x, np.int64(37), CONTIGUOUS)
    np.testing.assert_array_equal(out, x)


def test_casts_to_half_types_round_to_even() -> None:
    x = np.concatenate(
        [drawn("f32", 1000), np.array([1e5, np.inf, np.nan, 1 + 2**-11, 0], np.float32)]
    )
    half, back = np.empty(x.size, np.float16), np.empty_like(x)
    run("copy", "cast_f32_f16", half, x, np.int64(x.size), CONTIGUOUS)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, x.astype(np.float16))
    run("copy", "cast_f16_f32", back, half, np.int64(x.size), CONTIGUOUS)
    np.testing.assert_array_equal(back, half.astype(np.float32))
    short = np.empty(x.size, np.uint16)
    run("copy", "cast_f32_bf16", short, x, np.int64(x.size), CONTIGUOUS)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(short[~np.isnan(x)], rounded[~np.isnan(x)])
    run("copy", "cast_bf16_f32", back, short, np.int64(x.size), CONTIGUOUS)
    np.testing.assert_array_equal(back, (short.astype(np.uint32) << 16).view(np.float32))
    run("elementwise", "round_to_bfloat16_f32", half := np.empty_like(x), x,
        np.int64(x.size), CONTIGUOUS)  # fmt: skip
    np.testing.assert_array_equal(half, back)
