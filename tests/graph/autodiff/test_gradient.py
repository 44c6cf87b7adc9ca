"""Errors where there is no gradient."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import UnsupportedError, UsageError
from allreduce.graph.core import op_table

ops = ar.ops


def _slopes(loss: Callable[[Any, ar.Variable], Any], by: Any = None) -> Any:
    """Differentiate by the variable, or by the result of `by` for argument and variable."""
    w = ar.Variable(np.ones((3, 2)), name="w")

    @ar.function
    def step(x: Any) -> Any:
        return ar.gradients(loss(x, w), [w] if by is None else by(x, w))

    return step(np.ones((4, 3)))


CUTS: dict[str, tuple[str, Callable[[Any, ar.Variable], Any]]] = {
    "argmax": ("argmax", lambda x, w: ops.mean(ops.argmax(x @ w, axis=1) == 1)),
    "less": ("less", lambda x, w: ops.cast(ops.sum(w) < 3, "float64")),
    "floor": ("floor", lambda x, w: ops.exp(ops.floor(ops.sum(w)) * 2.5)),
    "stopped": ("stop_gradient", lambda x, w: ops.stop_gradient(w * 2) + ops.sum(x)),
}


@pytest.mark.parametrize("name", CUTS)
def test_the_operator_that_cut_the_way_is_named(name: str) -> None:
    operator, loss = CUTS[name]
    said = rf"no gradient flows .* operator '{operator}' at .*test_gradient\.py:\d+ passes none on"
    with pytest.raises(UsageError, match=said):
        _slopes(loss)


def test_a_loss_of_other_variables_is_told_apart() -> None:
    with pytest.raises(UsageError, match="does not depend on any of the variables; were they made"):
        _slopes(lambda x, w: ops.sum(x) + 0 * ops.floor(ops.sum(x)))


WRONG: dict[str, tuple[str, Callable[[Any, ar.Variable], Any]]] = {
    "no list": (r"a list .*, got Variable; .*\[x\]", lambda x, w: w),
    "a tensor": (r"a list .*, got TracedTensor", lambda x, w: x),
    "none": ("no variables were given", lambda x, w: []),
    "an array": ("not by ndarray", lambda x, w: [w, np.ones(3)]),
    "a number": ("not by float 2.5", lambda x, w: (2.5,)),
    "numbers": ("is int64; there are gradients by floats only", lambda x, w: [ops.argmax(x)]),
    "a counter": (
        "variable 'n' is int64; there are gradients by floats only",
        lambda x, w: [w, ar.Variable([2, 2], name="n")],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_there_are_no_gradients_by_is_refused(name: str) -> None:
    said, by = WRONG[name]
    with pytest.raises(UsageError, match=rf"test_gradient\.py:\d+: .*{said}"):
        _slopes(lambda x, w: ops.sum(x @ w * 2.5), by)


@pytest.mark.parametrize("lacking", ["both", 0, 1])
def test_the_argument_without_a_gradient_is_named(
    lacking: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))

    def gradient(dy: Any, y: Any, inputs: Any, attrs: Any) -> Any:
        return [None if i == lacking else dy for i in range(2)]

    together = ar.register_op(
        "together_for_a_test",
        shape=lambda specs, attrs: specs[0],
        cpu=lambda out, inputs, attrs: np.add(inputs[0], inputs[1], out=out),
        gradient=None if lacking == "both" else gradient,
    )
    argument = 0 if lacking == "both" else lacking
    said = re.escape(f"operator 'together_for_a_test' has no gradient for its argument {argument},")
    with pytest.raises(UnsupportedError, match=said):
        _slopes(lambda x, w: ops.sum(together(w, w)))
