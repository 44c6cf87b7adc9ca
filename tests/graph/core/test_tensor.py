"""Tensors as Python's numbers: those with a value, and those without one yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from allreduce.errors import UsageError
from allreduce.graph import Variable, function, ops

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


def test_a_variable_counts_with_its_value() -> None:
    flag, pair = Variable(np.float32(0), name="flag"), Variable(np.arange(2), name="pair")
    assert not flag
    assert flag != 1
    np.testing.assert_array_equal(np.asarray(pair == [0, 0]), [True, False])
    np.testing.assert_array_equal(np.asarray(np.zeros(2) != pair), [False, True])

    @function
    def equal(x: Any) -> Any:
        return pair == x, flag != x

    same, other = equal(np.int64(1))
    np.testing.assert_array_equal(np.asarray(same), [False, True])
    assert np.asarray(other)
    with pytest.raises(
        UsageError, match=r"test_tensor.py:\d+: a tensor of shape \(\) was used as a b"
    ):
        function(lambda x: x if flag else -x)(np.ones(2))


def test_variables_are_told_apart_by_what_they_are() -> None:
    one, other = Variable(np.zeros(2), name="one"), Variable(np.zeros(2), name="other")
    assert [other, None, one].index(one) == 2
    assert one not in [other, None]
    assert len({one, other}) == 2


def test_calls_with_a_variable_are_told_from_those_with_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twice = function(lambda x: x * 2)
    for each in (1, 2, 3, Variable(np.ones(2)), 4):
        twice(each)
    assert "args[0] was float64(2,) and is now 4" in caplog.text


def test_elements_cannot_be_set() -> None:
    for value in (Variable(np.zeros(2), name="w"), ops.zeros((2,))):
        with pytest.raises(
            UsageError, match=r"test_tensor.py:\d+: no element can be set; variable"
        ):
            value[0] = 1.0  # type: ignore[index]  # for type checkers, too


def test_attributes_of_other_libraries_name_what_does_the_same() -> None:
    variable: Any = Variable(np.zeros(2), name="w")
    for name, said in {
        "assign_add": r"use variable\.assign\(variable \+ value\)",
        "grad": r"ar\.gradients\(loss, variables\)",
        "mean": r"use ar\.ops\.mean\(x\)",
        "shap": "a variable has no attribute 'shap'$",
    }.items():
        with pytest.raises(AttributeError, match=said):
            getattr(variable, name)


def test_lists_of_several_lengths_are_no_tensor() -> None:
    ragged = [[1.0], [2.0, 3.0]]
    with pytest.raises(UsageError, match=r"test_tensor.py:\d+: cannot make a tensor of a list: "):
        ops.sum(ragged)
    with pytest.raises(UsageError, match="variable 'w': setting an array element"):
        Variable(ragged, name="w")


class Broken:
    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise ValueError("a mistake of its own")


def test_an_error_of_ones_own_array_stays_as_it_is() -> None:
    for make in (ops.sum, Variable):
        with pytest.raises(ValueError, match="a mistake of its own") as caught:
            make(Broken())
        assert caught.type is ValueError
        assert caught.traceback[-1].name == "__array__"


def test_what_is_no_number_is_no_tensor() -> None:
    """The error names the array's dtype, not its values, and a remedy."""
    for strings in (np.array([["0.0", "0.25"]] * 3), np.array([["a"]] * 3, object)):
        with pytest.raises(UsageError) as caught:
            ops.sum(strings)
        said = str(caught.value)
        assert (
            f"make a tensor of ndarray of shape {strings.shape} and dtype {strings.dtype}" in said
        )
        assert "encode strings as integers" in said
    with pytest.raises(UsageError, match="cannot make a tensor of str 'b'; it takes numbers"):
        ops.add(np.ones(3), "b")
