"""Every operator and its gradient, its nodes spread over the tasks of a cluster at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.graph.core.node import Node
from tests.graph.ops.case import Case
from tests.graph.ops.cases import CASES
from tests.server.clusters import serving

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_tasks_compute_the_bits_of_one_process(session: ar.Session, case: Case) -> None:
    full = [shapes for shapes in case.shapes if all(0 not in shape for shape in shapes)]
    inputs = case.draw((full or list(case.shapes))[0], 1)
    step = _with_gradients(case)
    expected = ar.function(step)(*inputs)

    def spread(*xs: Any) -> Any:
        with ar.device(_scattered(len(case.op))):
            return step(*xs)

    for one, other in zip(_leaves(session.run(spread, inputs)), _leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def _leaves(result: Any) -> list[np.ndarray]:
    value, gradients = result
    return [np.asarray(each) for each in (value, *gradients)]
