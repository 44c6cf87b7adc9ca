"""Check integers and switches from callers; NumPy's count, too."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from allreduce.errors import UsageError


def integer(what: str, value: object, low: int | None = None) -> int:
    """Return `value` as an int.

    Args:
        what: Its name, for the message.
        value: An int, or an object that converts to one without loss; a bool does not.
        low: The least allowed value, if any.

    Raises:
        UsageError: It is no integer, or below `low`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # raises if it is no integer
        if low is not None and number < low:
            raise ValueError
    except (TypeError, ValueError):
        least = "" if low is None else f" from {low}"
        raise UsageError(f"{what} is an integer{least}, not {value!r}") from None
    return number


def switch(name: str, value: Any) -> bool:
    """Check an argument that is True or False, or 1 or 0; Python takes even "no" for true."""
    if not isinstance(value, int | np.integer | np.bool_) or value not in (0, 1):
        raise UsageError(f"{name} is True or False, not {value!r}")
    return bool(value)
