"""Every operator and its gradient, its nodes spread over the tasks of a cluster at random.

In tasks of one process, whose programs together are checked for hazards, too, and in tasks that
are processes, with updates and random draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
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
from tests.server.clusters import describe, processes, serving
from tests.server.joined import joined

TASKS = ("/job:worker/task:0", "/job:worker/task:1", "/job:ps/task:0", "/job:ps/task:1")
X = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def session() -> Iterator[ar.Session]:
    with serving(worker=2, ps=2) as servers, ar.Session(servers[0].target, timeout=60) as made:
        yield made


def _scattered(seed: int, tasks: Sequence[str] = TASKS, cpus: int = 2) -> Callable[[Node], str]:
    """Return a function for `ar.device` that draws a task and one of its devices."""
    drawn = random.Random(seed)
    return lambda _: f"{drawn.choice(tasks)}/cpu:{drawn.randrange(cpus)}"


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
    _compare(session, case, _scattered(len(case.op)), programs.clear)
    assert hazards(joined(programs)) == []


def _compare(
    session: ar.Session, case: Case, devices: Callable[[Node], str], between: Callable[[], object]
) -> None:
    """Run a case here, then on the tasks of a cluster, and compare the bits."""
    full = [shapes for shapes in case.shapes if all(0 not in shape for shape in shapes)]
    inputs = case.draw((full or list(case.shapes))[0], 1)
    step = _with_gradients(case)
    expected = ar.function(step)(*inputs)
    between()

    def spread(*xs: Any) -> Any:
        with ar.device(devices):
            return step(*xs)

    for one, other in zip(_leaves(session.run(spread, inputs)), _leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=case.op)


_TORTURE = pytest.mark.torture


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=_TORTURE), 2, pytest.param(3, marks=_TORTURE), 4]
)
def test_processes_compute_the_bits_of_one(count: int) -> None:
    spec = describe({"worker": count})
    tasks = [f"/job:worker/task:{i}" for i in range(count)]
    target = f"grpc://{spec.address('worker', 0)}"
    with processes(spec), ar.Session(target, timeout=60) as session:
        for case in CASES[count // 2 % 2 :: 2]:
            _compare(session, case, _scattered(len(case.op), tasks, 1), int)
        step, variables = _training(_scattered(count, tasks, 1))
        found = [np.asarray(session.run(step, (X + i,))) for i in range(3)]
        after = [session.read(each) for each in variables]
    step, variables = _training(lambda _: "cpu:0")
    alone = ar.function(step)
    for i, losses in enumerate(found):
        np.testing.assert_array_equal(losses, alone(X + i))
    for value, variable in zip(after, variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())


def _training(devices: Callable[[Node], str]) -> tuple[Callable[..., Any], list[ar.Variable]]:
    """Return a step with random draws and Adam, and its variables."""
    ar.set_seed(5)
    kernel = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    with ar.device(devices):
        variables = [ar.Variable(kernel, name="kernel"), ar.Variable(kernel.T, name="head")]
    optimizer = ar.optim.Adam(0.05)

    def step(x: ar.Tensor) -> Any:
        with ar.device(devices):
            hidden = ar.ops.dropout(ar.ops.tanh(x @ variables[0]), 0.3)
            loss = ar.ops.sum(ar.ops.square(hidden @ variables[1]), axis=1)
        optimizer.minimize(loss, variables)
        return loss

    return step, variables


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
