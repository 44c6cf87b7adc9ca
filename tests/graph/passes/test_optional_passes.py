"""Optional passes: what each does to a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from allreduce.errors import UsageError
from allreduce.graph import device, function, ops, passes
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core.node import Graph
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.fusion import slots_of
from allreduce.graph.passes.fold import fold
from allreduce.graph.passes.fuse import fuse
from allreduce.graph.passes.simplify import simplify
from tests.graph.interpret import interpret, record

FLOAT = np.dtype(np.float64)


def _ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if node.op != "placeholder"]


def _pruned(graph: Graph) -> Graph:
    return passes.prune(graph)


def test_constants_are_computed_once() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        table = ops.transpose(ops.one_hot([2, 0], 3, "float64")) * 2.0
        return [x @ table, ops.zeros((x.shape[0],)), ops.zeros((300, 300))]

    graph = record(traced, Spec((BATCH, 3), FLOAT))
    folded = _pruned(fold(graph))
    assert _ops(folded) == ["constant", "matmul", "fill", "fill"]
    x = np.arange(6.0).reshape(2, 3)
    for found, expected in zip(interpret(folded, [x], 2), interpret(graph, [x], 2), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_constant_that_is_wrong_is_told_when_the_step_runs() -> None:
    step = function(lambda x: ops.one_hot([7], 3) + x)
    with pytest.raises(UsageError, match="label 7 in row 0"):
        step(np.ones(3, np.float32))


def test_what_changes_nothing_is_left_out() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        y = ops.stop_gradient(ops.negative(-(((x + -0.0) * 1.0 - 0.0) / 1.0)))
        return [ops.transpose(ops.transpose(y, (0, 1)), (1, 0)), -0.0 + ops.exp(x)]

    graph = record(traced, Spec((2, 3), FLOAT))
    assert _ops(_pruned(simplify(graph))) == ["transpose", "exp"]
    counted = record(lambda n: [n + 0 - 0], Spec((2,), np.dtype(np.int64)))
    assert _ops(_pruned(simplify(counted))) == []


def test_zeros_keep_their_signs() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        signed: list[Any] = [np.float32(0.0), np.float32(-0.0)]
        zeros = [x * ops.full((1,), zero) for zero in signed]
        return [x + 0.0, 0.0 + x, x - -0.0, *zeros]

    graph = record(traced, Spec((1,), np.dtype(np.float32)))
    for number in (-0.0, 1.0):
        x = np.full(1, number, np.float32)
        found, wanted = (np.signbit(interpret(g, [x])) for g in (_pruned(simplify(graph)), graph))
        np.testing.assert_array_equal(found, wanted)


def test_what_broadcasts_or_converts_is_kept() -> None:
    def traced(x: Tensor, n: Tensor) -> list[Tensor]:
        return [x + np.zeros((4, 3)), n * np.float64(1.0), x * np.array([1.0, 2.0, 1.0])]

    graph = record(traced, Spec((3,), FLOAT), Spec((3,), np.dtype(np.int64)))
    assert _ops(_pruned(simplify(graph))).count("add") == 1
    assert _ops(_pruned(simplify(graph))).count("multiply") == 1  # by ones; the cast stays
    assert "cast" in _ops(_pruned(simplify(graph)))


def test_what_was_computed_is_not_computed_again() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        with device("CPU:1"):
            elsewhere = ops.exp(x)
        draws = [ops.dropout(x, 0.5, seed=1) for _ in range(2)]
        return [ops.exp(x) * ops.exp(x), elsewhere, ops.sum(x, 0) + ops.sum(x, 1), *draws]

    graph = record(traced, Spec((2, 2), FLOAT))
    counted = _ops(_pruned(simplify(graph)))
    assert counted.count("exp") == 2
    assert counted.count("sum") == 2
    assert counted.count("dropout") == 2


def _chained(x: Tensor, row: Tensor, column: Tensor) -> list[Tensor]:
    hidden = ops.relu(ops.sqrt(ops.square(x)) * row + column / 3.0)
    return [ops.where(hidden > 0.5, -hidden, ops.minimum(x, 1.0)), ops.sum(hidden)]


def test_chains_become_one_operation() -> None:
    graph = record(_chained, *(Spec(shape, FLOAT) for shape in ((5, 4), (4,), (5, 1))))
    fused = _pruned(fuse(graph))
    assert _ops(fused).count("fused") == 2  # hidden, which is read twice, and what follows
    assert "sqrt" not in _ops(fused)


def test_operations_without_a_native_kernel_stay_separate() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        return [ops.square(ops.exp(-ops.square(x)) * 2.0) + 1.0]

    graph = record(traced, Spec((5, 4), FLOAT))
    fused = _pruned(fuse(graph))
    assert [op for op in _ops(fused) if op != "constant"] == ["fused", "exp", "fused"]
    x = np.random.default_rng(0).normal(size=(5, 4))
    np.testing.assert_array_equal(interpret(fused, [x])[0], interpret(graph, [x])[0])


def test_a_chain_of_too_many_inputs_stays_separate() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        y = x[0]
        for i in range(1, 2100):
            y = y + x[i]
        return [y]

    graph = record(traced, Spec((2100, 1), FLOAT))
    assert "fused" not in _ops(fuse(graph))


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (5, 4), (700, 33), (2, 3, 20_000)])
@pytest.mark.parametrize("strided", [False, True])
def test_a_chain_gives_what_its_operations_give(shape: tuple[int, ...], strided: bool) -> None:
    generator = np.random.default_rng(1)
    column = (*shape[:-1], 1) if shape else ()
    feeds = [generator.normal(size=each) for each in (shape, shape[-1:], column)]
    if strided:
        feeds = [np.asfortranarray(x) for x in feeds]
    graph = record(_chained, *(Spec(x.shape, FLOAT) for x in feeds))
    fused = _pruned(fuse(graph))
    for found, expected in zip(interpret(fused, feeds), interpret(graph, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_long_chain_reuses_its_blocks() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        y = x
        for _ in range(30):
            y = ops.sqrt(y * y) + ops.relu(y) * ops.cast(ops.cast(x > 0, "float32"), "float64")
        return [y]

    graph = record(traced, Spec((50, 1000), FLOAT))
    fused = _pruned(fuse(_pruned(simplify(graph))))
    chains = [node.attrs["chain"] for node in fused.nodes if node.op == "fused"]
    assert max(max(slots_of(chain.links)) for chain in chains) < 7
    x = np.random.default_rng(0).normal(size=(50, 1000))
    np.testing.assert_array_equal(interpret(fused, [x])[0], interpret(graph, [x])[0])


def _layers(x: Tensor, w: Tensor, b: Tensor, k: Tensor, c: Tensor) -> list[Tensor]:
    """Products with what follows them, and their gradients."""
    hidden = ops.relu(x @ w + b)
    images = ops.gelu(ops.conv2d(ops.reshape(hidden, (-1, 4, 5, 2)), k, padding="same") + c)
    loss = ops.mean(ops.square(images), axis=(1, 2, 3)) * 2.0
    return [loss, *backward(loss, [x, w, b, k, c], 1.0)]


@pytest.mark.parametrize("batch", [0, 1, 3, 6000])
def test_fused_layers_and_their_gradients_give_what_they_gave(batch: int) -> None:
    generator = np.random.default_rng(1)
    shapes = [(batch, 3), (3, 40), (40,), (3, 2, 2, 3), (3,)]
    feeds = [generator.normal(size=shape) for shape in shapes]
    specs = [Spec((BATCH, 3), FLOAT), *(Spec(x.shape, FLOAT) for x in feeds[1:])]
    graph = record(_layers, *specs)
    fused = _pruned(fuse(_pruned(simplify(graph))))
    assert _ops(fused).count("fused") >= 3
    wanted = interpret(graph, feeds, batch)
    for found, expected in zip(interpret(fused, feeds, batch), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_what_is_fetched_or_elsewhere_is_not_joined() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        y = ops.sqrt(x)
        with device("CPU:1"):
            z = ops.sqrt(y + 1.0)
        return [y, z * 2.0]

    assert _ops(_pruned(fuse(record(traced, Spec((3,), FLOAT))))) == [
        *("sqrt", "constant", "fused", "constant", "multiply"),
    ]
