"""Random tensors: distributions, and independence of how rows are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce.errors import ShapeError, UsageError
from allreduce.graph import function, set_seed
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from tests.graph.interpret import interpret, record

FLOAT = np.dtype(np.float64)
untyped: Any = ops
DRAWS: dict[str, Callable[..., Tensor]] = {"uniform": ops.uniform, "normal": ops.normal}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7)])
def test_a_draw_does_not_depend_on_how_rows_are_split(name: str, shape: tuple[int, ...]) -> None:
    def traced(x: Tensor) -> list[Tensor]:
        rows = DRAWS[name]((x.shape[0], *shape), dtype="float64", seed=3)
        return [rows, DRAWS[name]((2, x.shape[0]), dtype="float64", seed=4)]

    graph = record(traced, Spec((BATCH,), FLOAT))

    def drawn(rows: int, offset: int) -> list[np.ndarray]:
        runtime = {"row_offset": offset, "step": 5}
        return interpret(graph, [np.zeros(rows)], rows, runtime)

    whole, turned = drawn(11, 0)
    parts = [drawn(rows, offset) for rows, offset in ((4, 0), (0, 4), (7, 4))]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), whole)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts], axis=1), turned)
    assert len(np.unique(whole)) == whole.size


def test_draws_are_distributed_as_they_say() -> None:
    low = ops.uniform((200_000,), -1, 3, seed=1).numpy()
    assert low.dtype == np.float32
    assert low.min() >= -1
    assert low.max() < 3
    np.testing.assert_allclose([low.mean(), low.std()], [1, 4 / 12**0.5], atol=0.01)
    bell = ops.normal((200_000,), 2, 0.5, dtype="float64", seed=1).numpy()
    np.testing.assert_allclose([bell.mean(), bell.std()], [2, 0.5], atol=0.01)
    standard = (bell - 2) / 0.5
    np.testing.assert_allclose([(standard**3).mean(), (standard**4).mean()], [0, 3], atol=0.05)
    np.testing.assert_allclose((abs(standard) < 1).mean(), 0.6827, atol=0.005)
    assert (ops.uniform((4,), 2, 2).numpy() == 2).all()


def test_steps_and_operators_draw_anew_and_seeds_repeat() -> None:
    @function
    def two() -> Any:
        return ops.normal((5,)), ops.normal((5,))

    set_seed(8)
    first = [value.numpy() for _ in range(2) for value in two()]
    assert len(np.unique(first)) == 20
    alone = [ops.uniform((3,)).numpy() for _ in range(2)]
    set_seed(9)
    assert not np.array_equal(function(ops.normal)((5,)).numpy(), first[0])
    set_seed(8)
    found = [ops.uniform((3,)).numpy() for _ in range(2)]
    np.testing.assert_array_equal(found, alone)
    numbers = [ops.uniform((3,), seed=9).numpy() for _ in range(2)]
    assert (numbers[0] != numbers[1]).all()


def test_a_permutation_is_one() -> None:
    shuffled = ops.permutation(100, seed=2).numpy()
    assert sorted(shuffled) == list(range(100))
    assert list(shuffled) != list(range(100))
    assert sorted(ops.permutation(np.int64(5)).numpy()) == list(range(5))
    rows = np.arange(12.0).reshape(4, 3)
    assert sorted(ops.permutation(rows, seed=3).numpy().tolist()) == rows.tolist()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ops.uniform((3,), 1, 0), "uniform draws from low to high, not 1 to 0"),
        (lambda: ops.normal((3,), stddev=-1), "the stddev of normal is not negative"),
        (lambda: ops.normal((3,), dtype="int64"), "normal draws floats, not int64"),
        (lambda: ops.uniform((-3,)), "sizes are 0 or more"),
        (lambda: ops.uniform((3,), float("nan"), 1), "the low of uniform is a finite number: nan"),
        (lambda: ops.normal((3,), stddev=float("inf")), "the stddev of normal is a finite number"),
        (lambda: ops.uniform((BATCH, 2, BATCH)), "only one size may be named"),
        (lambda: untyped.uniform((3,), seed="abc"), "the seed is an integer from 0"),
        (lambda: untyped.dropout(np.ones(3), 0.5, seed=1.5), "the seed is an integer from 0"),
        (lambda: ops.permutation(np.float64(3)), "shuffles the numbers below an integer"),
        (lambda: ops.permutation(True), "shuffles the numbers below an integer"),
        (lambda: ops.permutation(-3), "shuffles the numbers below an integer that is 0 or more"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call: Any, said: str) -> None:
    with pytest.raises((ShapeError, UsageError), match=said):
        call()
