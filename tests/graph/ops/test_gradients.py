"""Every operator's gradient against central differences, in float64, for every argument.

And the values of the cases that say what is expected, in float64 and float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core.node import Graph
from allreduce.graph.core.op_table import cut, lookup, names
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from tests.graph.interpret import interpret, record
from tests.graph.ops.case import Case, Shapes
from tests.graph.ops.cases import CASES

FLOAT = np.dtype(np.float64)
STEP = 1e-5  # the error of a central difference is about STEP² and 1e-16 / STEP


def _shaped(cases: Iterable[Case]) -> list[Any]:
    return [
        pytest.param(
            case, shapes, id=f"{i}-{case.op}-{'-'.join(map(str, shapes))}".replace(" ", "")
        )
        for i, case in enumerate(cases)
        for shapes in case.shapes
    ]


def numeric_gradients(
    graph: Graph, inputs: Sequence[np.ndarray], weights: np.ndarray
) -> list[np.ndarray]:
    """Differentiate the weighted sum of a graph's only output."""
    results = []
    for position, x in enumerate(inputs):
        result = np.empty_like(x)
        for index in np.ndindex(x.shape):
            ends = []
            for sign in (1, -1):
                moved = [each.copy() for each in inputs]
                moved[position][index] = x[index] + sign * STEP
                ends.append(float((interpret(graph, moved)[0] * weights).sum()))
            result[index] = (ends[0] - ends[1]) / (2 * STEP)
        results.append(result)
    return results


@pytest.mark.parametrize(("case", "shapes"), _shaped(CASES))
def test_gradients_agree_with_differences(case: Case, shapes: Shapes) -> None:
    specs = [Spec(shape, FLOAT) for shape in shapes]
    inputs = case.draw(shapes, seed=1)
    forward = record(lambda *x: [case.call(*x)], *specs)
    assert case.op in {node.op for node in forward.nodes}
    (value,) = interpret(forward, inputs)
    weights = np.random.default_rng(2).uniform(0.5, 1.5, value.shape)
    # An argument whose change cannot be seen, like a condition, is left out.
    reached = [i for i in range(len(specs)) if case.op != "where" or i > 0]

    def differentiate(*x: Tensor) -> list[Tensor]:
        return backward(case.call(*x[:-1]), [x[i] for i in reached], x[-1])

    graph = record(differentiate, *specs, Spec(value.shape, FLOAT))
    found = interpret(graph, [*inputs, weights])
    expected = numeric_gradients(forward, inputs, weights)
    for i, gradient in zip(reached, found, strict=True):
        np.testing.assert_allclose(gradient, expected[i], rtol=1e-6, atol=1e-8)
    apart = [np.stack([each, each + 1], axis=-1)[..., 0] for each in (*inputs, weights)]
    for gradient, before in zip(interpret(graph, apart), found, strict=True):
        np.testing.assert_allclose(gradient, before, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("case", "shapes"), _shaped(case for case in CASES if case.expected))
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-5)])
def test_values_agree_with_numpy(case: Case, shapes: Shapes, dtype: str, tolerance: float) -> None:
    inputs = [array.astype(dtype) for array in case.draw(shapes, seed=3)]
    graph = record(lambda *x: [case.call(*x)], *(Spec(each.shape, each.dtype) for each in inputs))
    (found,) = interpret(graph, inputs)
    assert case.expected is not None
    expected = case.expected(*(each.astype(np.float64) for each in inputs))
    assert (found.dtype, found.shape) == (np.dtype(dtype), expected.shape)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_every_gradient_has_a_case() -> None:
    differentiable = {
        name
        for name in names()
        if lookup(name).kind == "compute" and lookup(name).gradient not in (None, cut)
    }
    # Rounding has steps; its gradient is the identity's (tests/optim/test_mixed_precision.py).
    # Rows of servers: tests/strategies/parameter_server/test_worker.py; layers register it.
    without = {case.op for case in CASES} | {"lookup_rows"}
    assert differentiable - without == {"round_to_bfloat16"}


def _network(labels: Tensor, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> list[Tensor]:
    hidden = ops.gelu(ops.matmul(ops.flatten(x), w1) + b1)
    merged = ops.reshape(ops.expand_dims(hidden, 0), (-1, 3))  # 2 · batch rows
    logits = ops.reshape(ops.relu(merged) @ w2, (x.shape[0], -1))
    centred = logits - ops.mean(logits, axis=0, keepdims=True)
    loss = ops.sparse_softmax_cross_entropy(labels, centred)
    return [loss, *backward(ops.mean(loss), [x, w1, b1, w2], 1.0)]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_named_batch_gives_what_its_size_gives(batch: int) -> None:
    generator = np.random.default_rng(0)
    shapes = [(batch, 2, 3), (6, 6), (6,), (3, 2)]
    feeds = [
        generator.integers(0, 4, batch, np.uint8),
        *(generator.normal(size=shape) for shape in shapes),
    ]
    labels = np.dtype(np.uint8)
    rest = [Spec(shape, FLOAT) for shape in shapes[1:]]
    named = record(_network, Spec((BATCH,), labels), Spec((BATCH, 2, 3), FLOAT), *rest)
    fixed = record(_network, Spec((batch,), labels), Spec((batch, 2, 3), FLOAT), *rest)
    for one, other in zip(interpret(named, feeds, batch), interpret(fixed, feeds), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_empty_named_batch_leaves_parameters_alone() -> None:
    def summed(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return backward(ops.softmax(ops.tanh(x @ w + b)), [w, b], 1.0)

    graph = record(summed, Spec((BATCH, 3), FLOAT), Spec((3, 2), FLOAT), Spec((2,), FLOAT))
    gradients = interpret(graph, [np.empty((0, 3)), np.ones((3, 2)), np.ones(2)], batch=0)
    np.testing.assert_array_equal(gradients[0], np.zeros((3, 2)))
    np.testing.assert_array_equal(gradients[1], np.zeros(2))


def test_a_gradient_can_be_differentiated_again() -> None:
    def second(x: Tensor) -> list[Tensor]:
        y = ops.relu(x) ** 3 + ops.exp(x) / x + ops.softmax(x) * x
        (first,) = backward(y, [x], 1.0)
        return [first, *backward(first, [x], 1.0)]

    spec = Spec((4,), FLOAT)
    x = np.array([0.5, -1.5, 2.0, 1.25])
    graph = record(second, spec)
    _, found = interpret(graph, [x])
    forward = record(lambda x: second(x)[:1], spec)
    (expected,) = numeric_gradients(forward, [x], np.ones(4))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


SECOND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "largest": lambda x, w: ops.sum(ops.max_pool2d(ops.conv2d(x, w), 2, 1) ** 3),
    "averages": lambda x, w: ops.sum(ops.average_pool2d(ops.conv2d(x, w), 2) ** 3),
    "padded": lambda x, w: ops.sum(ops.max_pool2d(ops.conv2d(x, w) ** 2, 2, padding="same")),
    "normalized": lambda x, w: ops.sum(ops.normalize(ops.conv2d(x, w), (1, 2), 0.1) ** 3),
    "labels": lambda x, w: ops.sum(
        ops.sparse_softmax_cross_entropy(
            np.arange(8).reshape(1, 2, 4) % 3, ops.conv2d(x, w, padding="same")[:, :2, :4]
        )
    ),
    "shares": lambda x, w: ops.sum(
        ops.softmax_cross_entropy(ops.softmax(ops.conv2d(x, w)), ops.conv2d(x, w * w))
    ),
    "spread": lambda x, w: ops.sum(ops.std(ops.conv2d(x, w), axis=-1)),
}


@pytest.mark.parametrize("name", SECOND)
def test_gradients_of_gradients_agree_with_differences(name: str) -> None:
    def slopes(x: Tensor, w: Tensor) -> Tensor:
        by_x, by_w = backward(SECOND[name](x, w), [x, w], 1.0)
        return ops.sum(by_x**2) + ops.sum(by_w**3)

    generator = np.random.default_rng(4)
    inputs = [generator.normal(size=(1, 4, 5, 2)), generator.normal(size=(2, 2, 2, 3))]
    specs = [Spec(x.shape, FLOAT) for x in inputs]
    forward = record(lambda x, w: [slopes(x, w)], *specs)
    found = interpret(record(lambda x, w: backward(slopes(x, w), [x, w], 1.0), *specs), inputs)
    expected = numeric_gradients(forward, inputs, np.ones(()))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_nothing_flows_through_a_deviation_of_0() -> None:
    graph = record(lambda x: backward(ops.std(x), [x], 1.0), Spec((3,), FLOAT))
    np.testing.assert_array_equal(interpret(graph, [np.ones(3)])[0], np.zeros(3))


def test_gradients_have_their_inputs_dtype() -> None:
    def mixed(x: Tensor, w: Tensor, n: Tensor) -> list[Tensor]:
        return backward(ops.mean((x * w + n) / 3 - 2 * x), [x, w], 1.0)

    single = Spec((3,), np.dtype(np.float32))
    graph = record(mixed, single, Spec((3,), FLOAT), Spec((3,), np.dtype(np.int32)))
    of_x, of_w = interpret(graph, [np.ones(3, np.float32), np.ones(3), np.ones(3, np.int32)])
    assert of_x.dtype == np.float32
    assert of_w.dtype == np.float64


def test_nothing_flows_back_through_a_cut() -> None:
    def kept(x: Tensor) -> list[Tensor]:
        return backward(x * ops.stop_gradient(x) + ops.floor(x) + ops.sign(x), [x], 1.0)

    (found,) = interpret(record(kept, Spec((3,), FLOAT)), [np.array([1.5, -2.5, 3.5])])
    np.testing.assert_array_equal(found, [1.5, -2.5, 3.5])


def test_equal_elements_share_or_go_first() -> None:
    def ties(x: Tensor) -> list[Tensor]:
        first = backward(ops.maximum(x, x * 1), [x], 1.0)
        return [*first, *backward(ops.max(x), [x], 1.0)]

    first, shared = interpret(record(ties, Spec((2,), FLOAT)), [np.array([3.0, 3.0])])
    np.testing.assert_array_equal(first, [1, 1])
    np.testing.assert_array_equal(shared, [0.5, 0.5])
