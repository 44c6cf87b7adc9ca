"""Lookups in a table of another process: which numbers it is asked for, and which are refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from allreduce.errors import UsageError
from allreduce.graph.ops.array.remote_rows import lookup_rows


class Doubles:
    """A table whose rows are twice their numbers."""

    rows, width = 5, 2

    def read(self, numbers: np.ndarray, out: np.ndarray) -> None:
        out[...] = 2 * numbers[:, None]

    def add_gradient(self, numbers: np.ndarray, gradients: np.ndarray) -> None:
        raise AssertionError("a lookup gives no gradients")


def look_up(numbers: np.ndarray) -> np.ndarray:
    return lookup_rows(Doubles(), np.zeros(1, np.float32), numbers).numpy()


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "uint64"])
def test_rows_have_the_shape_of_their_numbers(dtype: str) -> None:
    numbers = np.asarray([[0, 4, 1]], dtype)
    np.testing.assert_array_equal(look_up(numbers), 2.0 * np.stack([numbers, numbers], axis=-1))
    assert look_up(np.zeros((0, 3), dtype)).shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(5, "uint8"), (-1, "int32"), (5, "int64"), (-(1 << 63), "int64"), (1 << 63, "uint64")],
)
def test_a_number_without_a_row_is_refused(number: int, dtype: str) -> None:
    said = f"number {number} is outside of 0…4, the rows of the table; it is at position (1, 0)"
    with pytest.raises(UsageError, match=re.escape(said)):
        look_up(np.asarray([[4, 0], [number, 1]], dtype))
