"""Rows of tables: groups of equal numbers, copies to their places, sums; against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from allreduce import _native

Groups = tuple[np.ndarray, np.ndarray, np.ndarray]  # the different numbers, the order, the starts


def group(numbers: np.ndarray) -> Groups:
    different, order = np.empty_like(numbers), np.empty(len(numbers), np.int64)
    starts = np.empty(len(numbers) + 1, np.int64)
    count = _native.group_numbers(numbers, different, order, starts)
    return different[:count], order, starts[: count + 1]


def some_numbers(size: int, below: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(size).integers(0, below, size).astype(dtype)


@pytest.mark.parametrize("size", [0, 1, 2, 1000, 5003])
@pytest.mark.parametrize(
    ("below", "dtype"),
    [(1, "int32"), (300, "int32"), (1 << 31, "int32"), (300, "int64"), (1 << 62, "int64")],
)
def test_groups_are_those_of_numpy(size: int, below: int, dtype: str) -> None:
    numbers = some_numbers(size, below, dtype)
    different, order, starts = group(numbers)
    expected, counts = np.unique(numbers, return_counts=True)
    np.testing.assert_array_equal(different, expected)
    np.testing.assert_array_equal(np.diff(starts), counts)
    np.testing.assert_array_equal(order, np.argsort(numbers, kind="stable"))


@pytest.mark.parametrize("below", [40, 1 << 30])  # many equal numbers, and hardly any
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_copied_to_all_places_and_added_up(below: int, dtype: str) -> None:
    numbers = some_numbers(1000, below, "int32")
    different, order, starts = group(numbers)
    gradients = np.random.default_rng(0).integers(-9, 9, (1000, 3)).astype(dtype)
    sums = np.empty((len(different), 3), dtype)
    _native.add_rows(starts, order, gradients, sums)
    expected = np.zeros_like(sums)
    np.add.at(expected, np.searchsorted(different, numbers), gradients)
    np.testing.assert_array_equal(sums, expected)
    out = np.empty_like(gradients)
    _native.spread_rows(starts, order, sums.view(np.uint8), out.view(np.uint8))
    np.testing.assert_array_equal(out, sums[np.searchsorted(different, numbers)])


def test_sums_of_many_rows_are_as_exact_as_float32() -> None:
    numbers = np.zeros(100_000, np.int32)
    _, order, starts = group(numbers)
    gradients, sums = np.full((len(numbers), 1), 0.1, np.float32), np.empty((1, 1), np.float32)
    _native.add_rows(starts, order, gradients, sums)
    assert sums[0, 0] == np.float32(np.float64(np.float32(0.1)) * len(numbers))


def test_arrays_of_other_sizes_are_refused() -> None:
    numbers, rows = np.asarray([3, 1, 3], np.int32), np.zeros((2, 4), np.float32)
    _, order, starts = group(numbers)
    with pytest.raises(ValueError, match="sizes"):
        _native.group_numbers(numbers, np.empty(2, np.int32), order, np.empty(4, np.int64))
    for whole in (np.zeros((2, 4), np.float32), np.zeros((3, 5), np.float32)):
        with pytest.raises(ValueError, match="sizes"):
            _native.add_rows(starts, order, whole, rows)
        with pytest.raises(ValueError, match="sizes"):
            _native.spread_rows(starts, order, rows.view(np.uint8), whole.view(np.uint8))
