"""Tensors as Python's numbers: those with a value, and those without one yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce.errors import UsageError
from allreduce.graph import function, ops

NUMBERS: dict[str, Callable[[Any], Any]] = {
    "range": lambda t: list(range(t)),
    "index": lambda t: "abcd"[t],
    "round": lambda t: round(t, 1),
    "format": lambda t: f"{t:.2f}",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_takes_numbers_takes_tensors_that_have_a_value(name: str) -> None:
    value = 2 if name in ("range", "index") else 2.25
    assert NUMBERS[name](ops.add(value, 0)) == NUMBERS[name](value)
    with pytest.raises(UsageError, match=r"test_tensor.py:\d+: a tensor of shape \(\) was used as"):
        function(NUMBERS[name])(np.asarray(value))


def test_a_tensor_without_a_value_can_still_be_shown() -> None:
    shown = []
    function(lambda t: shown.append(f"{t}"))(np.ones(2))
    assert shown == ["<tensor %0 float64(2,)>"]
