"""Limit the norm of a mean gradient by the number that its sum is divided by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

_BLOCK = 1 << 20  # elements that BLAS adds up without losing digits


def set_divisor(divisor: np.ndarray, count: np.ndarray, squares: float, limit: float) -> None:
    """Set what to divide gradients by so that the norm of their mean is `limit` at most.

    Args:
        divisor: Is set, `(1,)`: to the count, or to more.
        count: The number of samples, `(1,)`.
        squares: The sum of the squares of all gradients' sums.
        limit: The largest norm.
    """
    norm, number = math.sqrt(squares), float(count[0])
    most = limit * number
    divisor[0] = number * (norm / most) if norm > most > 0 else number


def sum_of_squares(arrays: Iterable[np.ndarray]) -> float:
    """Add up the squares of flat arrays."""
    return sum(_square(part) for array in arrays for part in _blocks(array))


def _square(part: np.ndarray) -> float:
    """Return the sum of the squares of a block, in float64 if float32 overflows (from 1.8e19)."""
    with np.errstate(over="ignore"):
        found = float(np.dot(part, part))
    if math.isinf(found):
        wide = part.astype(np.float64)
        found = float(np.dot(wide, wide))
    return found


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(array), _BLOCK):
        yield array[first : first + _BLOCK]
