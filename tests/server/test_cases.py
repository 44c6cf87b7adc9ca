"""Every operator and its gradient, its nodes spread over the tasks of a cluster at random.

The tasks' programs together are checked for hazards, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.graph.core.node import Node
from allreduce.graph.execute import executor
from allreduce.graph.execute.bound_program import BoundProgram
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.program_facts import ProgramFacts
from tests.graph.ops.case import Case
from tests.graph.ops.cases import CASES
from tests.graph.schedule.hazards import hazards
from tests.server.clusters import serving
from tests.server.joined import joined

TASKS = ("/job:worker/task:0", "/job:worker/task:1", "/job:ps/task:0", "/job:ps/task:1")


@pytest.fixture(scope="module")
def session() -> Iterator[ar.Session]:
    with serving(worker=2, ps=2) as servers, ar.Session(servers[0].target, timeout=60) as made:
        yield made


def _scattered(seed: int) -> Callable[[Node], str]:
    """Return a function for `ar.device` that draws a task and one of its devices."""
    drawn = random.Random(seed)
    return lambda _: f"{drawn.choice(TASKS)}/cpu:{drawn.randrange(2)}"


def _with_gradients(case: Case) -> Callable[..., Any]:
    def step(*inputs: Any) -> Any:
        value = case.call(*inputs)
        return value, ar.gradients(ar.ops.sum(value * value), inputs)

    return step


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Collect what tasks of this process run."""
    found: list[Program] = []

    class Seen(BoundProgram):
        def __init__(self, facts: ProgramFacts, *rest: Any, **named: Any) -> None:
            found.append(facts.program)
            super().__init__(facts, *rest, **named)

    monkeypatch.setattr(executor, "BoundProgram", Seen)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_tasks_compute_the_bits_of_one_process(
    session: ar.Session, case: Case, programs: list[Program]
) -> None:
    full = [shapes for shapes in case.shapes if all(0 not in shape for shape in shapes)]
    inputs = case.draw((full or list(case.shapes))[0], 1)
    step = _with_gradients(case)
    expected = ar.function(step)(*inputs)
    programs.clear()

    def spread(*xs: Any) -> Any:
        with ar.device(_scattered(len(case.op))):
            return step(*xs)

    for one, other in zip(_leaves(session.run(spread, inputs)), _leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    assert hazards(joined(programs)) == []


def test_a_value_that_no_task_sends_is_found(session: ar.Session, programs: list[Program]) -> None:
    def step(x: Any) -> Any:
        with ar.device(f"{TASKS[0]}/cpu:0"):
            y = x * 2.0
        with ar.device(f"{TASKS[1]}/cpu:0"):
            return y + 1.0

    session.run(step, (np.ones(3, np.float32),))
    assert hazards(joined(programs)) == []
    without = [
        replace(
            each, instructions=tuple(i for i in each.instructions if i.node.op != "send"), blocks=()
        )
        for each in programs
    ]
    with pytest.raises(AssertionError, match="tasks wait for each other"):
        joined(without)


def _leaves(result: Any) -> list[np.ndarray]:
    value, gradients = result
    return [np.asarray(each) for each in (value, *gradients)]
