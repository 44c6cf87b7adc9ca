"""`ar.print`: in the order of the program, on every replica, in every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import allreduce as ar


def test_a_step_prints_when_it_gets_there(capsys: pytest.CaptureFixture[str]) -> None:
    total = ar.Variable(np.zeros(()), name="total")

    @ar.function
    def add(x: Any) -> None:
        ar.print("before", total)
        total.assign(total + ar.ops.sum(x))
        ar.print("after", total, x.shape, sep=": ")

    add(np.ones(3))
    add(np.ones(3))
    assert capsys.readouterr().out.splitlines() == [
        "before 0.0",
        "after: 3.0: (3,)",
        "before 3.0",
        "after: 6.0: (3,)",
    ]


def test_outside_of_functions_it_prints_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    ar.print(ar.ops.exp(np.zeros(2)), ar.Variable(np.ones(1), name="one"), "text", 3)
    assert capsys.readouterr().out == "[1. 1.] [1.] text 3\n"


def test_replicas_say_who_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    ar.config.set_logical_devices("CPU", 4)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])

    @ar.function
    def step(x: Any) -> None:
        ar.print("rows", ar.ops.sum(x, axis=0))

    for (batch,) in strategy.distribute_dataset([(np.arange(3.0),), (np.arange(1.0),)]):
        strategy.run(step, args=(batch,))
    said = capsys.readouterr().out.splitlines()
    assert sorted(said[:2]) == ["replica 0: rows 1.0", "replica 1: rows 2.0"]
    assert said[2:] == ["replica 0: rows 0.0"]  # the other one has no samples


def test_a_function_that_prints_can_be_called_on_one_of_several_replicas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ar.config.set_logical_devices("CPU", 4)
    with ar.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        ar.function(lambda x: ar.print("got", x))(np.ones(2))
    assert capsys.readouterr().out == "got [1. 1.]\n"


def test_values_in_structures_are_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    @ar.function
    def step(x: Any) -> None:
        ar.print({"sum": ar.ops.sum(x), "of": ["rows", x.shape]}, [1, (x,)])

    step(np.ones(2))
    assert capsys.readouterr().out == "{'sum': 2.0, 'of': ['rows', (2,)]} [1, ([1. 1.],)]\n"
    with pytest.raises(TypeError, match=r"^print\(\) got an unexpected keyword argument 'end'"):
        ar.print("x", end="")  # type: ignore[call-arg]


def test_a_separator_that_is_no_text_is_refused() -> None:
    untyped: Any = ar.print
    with pytest.raises(ar.UsageError, match="sep is text, not 3"):
        untyped("before", sep=3)
