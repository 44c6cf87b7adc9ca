"""Operators that users add, as docs/operators.md shows it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import ShapeError, UnsupportedError, UsageError
from allreduce.graph.core import op_table
from allreduce.graph.core.scope import part
from tests.graph.ops.test_docs import PAGE


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))


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
        ({"cuda": "exp.cu"}, "operator 'wrong_for_a_test': cuda is a function"),
        ({"cpu": None}, "operator 'wrong_for_a_test': cpu is a function"),
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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cpu": lambda out, inputs, attrs: inputs[0] * 2}, "returned a ndarray instead of writ"),
        ({"shape": lambda specs, attrs: specs[0].shape}, r"the shape rule of .* gave \(3,\)"),
        ({"shape": lambda specs, attrs: type(specs[0])(3, "float64")}, "gave the shape 3; it is"),
        ({"shape": lambda specs, attrs: type(specs[0])((3,), "float6")}, "'float6' is no dtype"),
        ({"shape": lambda specs, attrs: type(specs[0])((0.5,), float)}, "sizes are integers"),
        ({"gradient": lambda dy, y, inputs, attrs: dy}, "one gradient for each of 1 inputs"),
        (
            {"gradient": lambda dy, y, inputs, attrs: [ar.ops.sum(dy)]},
            r"operator 'wrong_for_a_test' gave \(\) for input 0, whose shape is \(3,\)",
        ),
        (
            {"gradient": lambda dy, y, inputs, attrs: [np.ones((2, 3))]},
            r"operator 'wrong_for_a_test' gave \(2, 3\) for input 0, whose shape is \(3,\)",
        ),
    ],
)
def test_what_a_users_operator_does_wrong_is_said(changed: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {
        "shape": lambda specs, attrs: specs[0],
        "cpu": lambda out, inputs, attrs: np.copyto(out, inputs[0]),
        "gradient": lambda dy, y, inputs, attrs: [dy],
    }
    operator = ar.register_op("wrong_for_a_test", **{**given, **changed})

    @ar.function
    def step(x: Any) -> Any:
        return ar.gradients(ar.ops.sum(operator(x)), [x])[0] + operator(x)

    with pytest.raises(UsageError, match=said):
        step(np.ones(3))


def test_gradients_and_specs_may_be_of_numpys_kinds() -> None:
    given: Any = ((np.int64(3),), "float32")
    operator = ar.register_op(
        "doubled_for_a_test",
        shape=lambda specs, attrs: type(specs[0])(*given),
        cpu=lambda out, inputs, attrs: np.multiply(inputs[0], 2, out=out),
        gradient=lambda dy, y, inputs, attrs: [np.full(3, 2.0)],
    )

    @ar.function
    def step(x: Any) -> Any:
        y = operator(x)
        return y * 1, *ar.gradients(ar.ops.sum(y), [x])

    value, slope = step(np.ones(3, np.float32))
    assert value.dtype == slope.dtype == np.float32
    np.testing.assert_array_equal([value.numpy(), slope.numpy()], np.full((2, 3), 2.0))


def test_an_error_in_a_users_kernel_says_whose_it_is() -> None:
    def cpu(out: Any, inputs: Any, attrs: Any) -> None:
        out[...] = inputs[0] * attrs["missing"]

    operator = ar.register_op("wrong_for_a_test", shape=lambda specs, attrs: specs[0], cpu=cpu)
    with pytest.raises(KeyError) as caught:
        operator(np.ones(3))
    of_kernel = "in the kernel of operator 'wrong_for_a_test'"
    assert caught.value.__notes__ == [of_kernel]

    @ar.function
    def step(x: Any) -> Any:
        return operator(x) + operator(2.0)  # the second of a constant, which a pass could compute

    with pytest.raises(KeyError) as caught:
        step(np.ones(3))
    told, place = caught.value.__notes__
    assert told == of_kernel
    line = step.python_function.__code__.co_firstlineno + 2
    assert place == f"operator 'wrong_for_a_test' at {__file__}:{line}"


@pytest.mark.parametrize("in_step", [False, True])
def test_a_usage_error_of_a_users_kernel_keeps_its_place_and_cause(in_step: bool) -> None:
    def helper(attrs: Any) -> None:
        try:
            attrs["missing"]
        except KeyError as error:
            raise UsageError("no missing row") from error

    def cpu(out: Any, inputs: Any, attrs: Any) -> None:
        helper(attrs)

    operator = ar.register_op("wrong_for_a_test", shape=lambda specs, attrs: specs[0], cpu=cpu)
    call = ar.function(lambda x: operator(x)) if in_step else operator
    with pytest.raises(UsageError, match="wrong_for_a_test: no missing row") as caught:
        call(np.ones(3, np.float32))
    assert [each.name for each in caught.traceback][-2:] == ["cpu", "helper"]
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_shape_error_of_a_users_rule_keeps_its_place() -> None:
    def rule(specs: Any, attrs: Any) -> Any:
        raise ShapeError("the rows must be even")

    operator = ar.register_op("wrong_for_a_test", shape=rule, cpu=lambda out, inputs, attrs: None)
    with pytest.raises(ShapeError, match="wrong_for_a_test: the rows must be even") as caught:
        operator(np.ones(3))
    assert caught.traceback[-1].name == "rule"
    assert caught.value.__notes__ == ["in the shape rule of operator 'wrong_for_a_test'"]


@pytest.mark.parametrize(
    ("layer", "whose"),
    [("", "the gradient of the loss"), ("net/0", "the gradient of layer 'net/0'")],
)
@pytest.mark.parametrize("kind", [UsageError, ValueError])
def test_an_error_in_a_gradient_is_of_no_layer_of_that_name(
    layer: str, whose: str, kind: type[Exception]
) -> None:
    def fail(out: Any, inputs: Any, attrs: Any) -> None:
        raise kind("of the kernel")

    slope = ar.register_op("wrong_for_a_test", shape=lambda specs, attrs: specs[0], cpu=fail)
    operator = ar.register_op(
        "right_for_a_test",
        shape=lambda specs, attrs: specs[0],
        cpu=lambda out, inputs, attrs: np.copyto(out, inputs[0]),
        gradient=lambda dy, y, inputs, attrs: [slope(dy)],
    )

    @ar.function
    def step(x: Any) -> Any:
        with part(layer):
            y = operator(x)
        return ar.gradients(ar.ops.sum(y), [x])

    with pytest.raises(kind) as caught:
        step(np.ones(3))
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(rf"( of|:\d+:) {whose}( at |: wrong_for_a_test: )", said), said
