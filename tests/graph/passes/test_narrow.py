"""Gradients that a rectifier stops before max-pooling hands them on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from allreduce.graph import ops
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core.node import Graph
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.passes.narrow import narrow
from allreduce.graph.passes.prune import prune
from tests.graph.interpret import interpret, record

# Windows that share pixels, leave some out, reach into padding; and those with a path of their own.
WINDOWS: list[dict[str, Any]] = [
    {},
    {"size": 3, "strides": 2, "padding": "same"},
    {"size": 3, "strides": 1},
    {"size": 2, "strides": 3},
]
SHAPE = (3, 8, 6, 5)


def _recorded(traced: Any, dtype: str) -> Graph:
    return prune(record(traced, Spec((BATCH, *SHAPE[1:]), np.dtype(dtype))))


def _backward(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if node.op.endswith("gradient")]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_the_rectifiers_gradient_comes_first_to_the_same_bits(
    windows: dict[str, Any], dtype: str
) -> None:
    def traced(x: Tensor) -> list[Tensor]:
        y = ops.max_pool2d(ops.relu(x), **windows)
        return backward(y / x[:, :1, :1], [x], 1.0)

    generator = np.random.default_rng(0)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], dtype)
    x = np.where(generator.random(SHAPE) < 0.3, generator.choice(special, SHAPE), 0).astype(dtype)
    x += generator.integers(-2, 3, SHAPE).astype(dtype)  # several pixels have a window's value
    graph = _recorded(traced, dtype)
    assert _backward(graph) == ["max_pool2d_gradient", "relu_gradient"]
    changed = narrow(graph)
    assert _backward(changed) == ["relu_gradient", "max_pool2d_gradient"]
    found, expected = (interpret(each, [x], len(x))[0] for each in (changed, graph))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def _also_elsewhere(x: Tensor) -> list[Tensor]:
    hidden = ops.relu(x)
    y = ops.max_pool2d(hidden)
    return backward(y, [hidden, x], 1.0)


def _of_other_images(x: Tensor) -> list[Tensor]:
    return backward(ops.max_pool2d(ops.relu(x) * 2.0), [x], 1.0)


def _of_a_sum(x: Tensor) -> list[Tensor]:
    hidden = ops.relu(x)
    return backward(ops.sum(ops.max_pool2d(hidden)) + ops.sum(hidden * 3.0), [x], 1.0)


@pytest.mark.parametrize("traced", [_also_elsewhere, _of_other_images, _of_a_sum])
def test_another_gradient_stays_behind_the_pooling(traced: Any) -> None:
    graph = _recorded(traced, "float32")
    assert _backward(narrow(graph)) == _backward(graph) == ["max_pool2d_gradient", "relu_gradient"]
