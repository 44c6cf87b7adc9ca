"""Operators that users add, as docs/operators.md shows it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import UnsupportedError, UsageError
from allreduce.graph.ops import base
from tests.graph.ops.test_docs import PAGE


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_TABLE", dict(base._TABLE))


def test_the_pages_example_runs_and_is_differentiated() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    softplus, x = names["softplus"], np.linspace(-3, 3, 7)
    np.testing.assert_allclose(names["y"].numpy(), np.log1p(np.exp(x)))

    @ar.function
    def slope(x: Any) -> Any:
        return ar.gradients(ar.ops.sum(softplus(x, beta=2.0)), [x])[0]

    step = 1e-6
    ends = [np.logaddexp(0, 2 * (x + sign * step)) for sign in (1, -1)]
    np.testing.assert_allclose(slope(x).numpy(), (ends[0] - ends[1]) / (2 * step), rtol=1e-6)
    with pytest.raises(UsageError, match="there is an operator 'softplus' already"):
        exec(code, {})


def test_one_without_a_gradient_is_named_with_the_users_line() -> None:
    halved = ar.register_op(
        "halved_for_a_test",
        shape=lambda specs, attrs: specs[0],
        cpu=lambda out, inputs, attrs: np.divide(inputs[0], 2, out=out),
    )

    @ar.function
    def slope(x: Any) -> Any:
        return ar.gradients(ar.ops.sum(halved(x)), [x])[0]

    with pytest.raises(UnsupportedError, match=r"test_custom.py:\d+: operator 'halved_for_a_test'"):
        slope(np.ones(3))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "two words"}, "an operator's name is an identifier, not 'two words'"),
        ({"name": "add"}, "there is an operator 'add' already"),
        ({"shape": (3,)}, "operator 'wrong_for_a_test': shape is a function"),
        ({"gradient": 1.0}, "operator 'wrong_for_a_test': gradient is a function"),
    ],
)
def test_what_is_no_operator_is_refused(arguments: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {
        "name": "wrong_for_a_test",
        "shape": lambda specs, attrs: specs[0],
        "cpu": lambda out, inputs, attrs: None,
    }
    with pytest.raises(UsageError, match=said):
        ar.register_op(**{**given, **arguments})
