"""Check and apply the factors of a sum or mean, and the divisor of a mean."""

from __future__ import annotations

import cmath
import reprlib
from typing import Any

import numpy as np

from allreduce.comm.arguments.checks import Context
from allreduce.comm.calls.call import Array
from allreduce.errors import UnsupportedError, UsageError

Factor = float | complex
_WIDER = {"float16": np.dtype("float32"), "bfloat16": np.dtype("float32")}


def check_factors(
    context: Context, factors: tuple[Any, Any], op: str | None, dtype: np.dtype[Any]
) -> tuple[Factor, Factor]:
    """Return the factors before and after a reduction as plain numbers.

    Raises:
        UsageError: One is no finite number of the type, real where the array is.
        UnsupportedError: The reduction is not one that scales.
    """
    before = _check_factor(context, "prescale", factors[0], dtype)
    after = _check_factor(context, "postscale", factors[1], dtype)
    if (before, after) != (1, 1) and (op not in ("sum", "mean") or dtype.kind not in "fcV"):
        raise UnsupportedError(
            f"{context.where} with operator {op} does not scale {dtype}: there are sum and mean of "
            "floating-point and complex types"
        )
    return before, after


def apply(array: Array, factor: Factor, out: Array) -> Array:
    """Multiply into `out`, which may be the array; silent about overflow, as sums are."""
    wide = _wide(array.dtype)
    with np.errstate(all="ignore"):
        np.multiply(array, wide.type(factor), out=out, dtype=wide, casting="unsafe")
    return out


def divide(array: Array, by: int) -> None:
    """Divide a contiguous array in place; of complex numbers both parts.

    NumPy multiplies complex numbers by the reciprocal: 5 / 3 would be rounded twice.
    """
    parts = array.reshape(-1).view(array.real.dtype)
    np.divide(parts, by, out=parts, casting="same_kind")


def _check_factor(context: Context, name: str, factor: Any, dtype: np.dtype[Any]) -> Factor:
    is_complex = dtype.kind == "c"
    kinds = int | float | np.integer | np.floating
    number: Factor | None = None
    try:
        if isinstance(factor, kinds) and not isinstance(factor, bool):
            number = float(factor)
        elif is_complex and isinstance(factor, complex | np.complexfloating):
            number = complex(factor)
            number = number if number.imag else number.real  # as it is compared
    except OverflowError:
        factor = "an integer beyond all floats"
    if number is None or not _is_finite(number, dtype):
        raise UsageError(
            f"{context.where}: {name} must be a finite {'' if is_complex else 'real '}number of "
            f"{dtype}'s range, but is {reprlib.repr(factor)}"
        )
    return number


def _is_finite(number: Factor, dtype: np.dtype[Any]) -> bool:
    if not cmath.isfinite(number) or dtype.kind not in "fcV":
        return cmath.isfinite(number)
    with np.errstate(over="ignore"):
        return bool(np.isfinite(_wide(dtype).type(number)))


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to multiply in: float32 for 16-bit floats, as in their sums."""
    return _WIDER.get(str(dtype), dtype)
