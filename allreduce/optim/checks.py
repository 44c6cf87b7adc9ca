"""Checks of numbers among arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from allreduce.errors import UsageError


def checked(
    name: str, value: Any, *, low: float, high: float = math.inf, above: bool = False
) -> float:
    """Check a hyperparameter: `low <= value < high`, or `low < value` with `above`.

    Args:
        value: A number, also as an array without axes.
        low: -infinity if there is no bound.

    Raises:
        UsageError: It is out of range, or no number.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        result = float(value)  # not finite: fails the comparisons, inf against the last one
        if (low < result or (result == low and not above)) and -math.inf < result < high:
            return result
    bounds = "" if low == -math.inf else f" {'>' if above else '>='} {low:g}"
    bounds += "" if high == math.inf else f" and < {high:g}"
    raise UsageError(f"{name} is a finite number{bounds}, not {value!r}")
