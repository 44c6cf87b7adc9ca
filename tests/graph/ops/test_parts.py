"""Operators that take tensors apart and put them together, against NumPy's, and their errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from allreduce.errors import ShapeError, UsageError
from allreduce.graph import Variable, function
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from tests.graph.interpret import interpret, record

FLOAT = np.dtype(np.float64)
X = np.arange(60.0).reshape(3, 4, 5)
untyped: Any = ops

KEYS: tuple[Any, ...] = (
    *(0, -1, slice(None), slice(1, None), slice(None, None, -1), slice(5, 1), ..., None),
    *((1, 2), (slice(None), -2), (..., 0), (0, ..., None), (None, slice(1, 3), None, 1)),
    (slice(None, None, 2), slice(-1, None, -2), slice(1, 4)),
    *(slice(-10, None, -1), (..., slice(-6, -9, -2))),  # begin before the array
    *([2, 0, 2], np.array([[0, -1], [1, 1]])),
)


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_an_index_takes_what_numpy_takes(key: Any) -> None:
    np.testing.assert_array_equal(ops.getitem(X, key).numpy(), X[key])
    np.testing.assert_array_equal(function(lambda x: x[key])(X).numpy(), X[key])


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (3, "3 is out of range for axis 0, which has 3 elements"),
        ((0, 0, 0, 0), "is too long"),
        ((..., 0, ...), "is too long"),
        (True, "a mask's result has a size that is not known"),
        ("a", "'a' is no integer"),
        (slice(0, 2, 0), "axis 0: slice step cannot be zero"),
        (([0], 1), "an array of integers is an index by itself"),
    ],
)
def test_a_wrong_index_is_refused(key: Any, said: str) -> None:
    with pytest.raises(ShapeError, match=rf"shape \(3, 4, 5\): .*{said}"):
        ops.getitem(X, key)


def test_rows_of_a_batch_are_not_taken_by_number() -> None:
    spec = Spec((BATCH, 4), FLOAT)
    with pytest.raises(ShapeError, match="would mean other rows on each replica"):
        record(lambda x: [x[[0, 1]]], spec)
    graph = record(lambda x: [ops.take(x, ops.cast(ops.sum(x, 1), int))], spec)  # by its own
    (found,) = interpret(graph, [np.array([[0.0, 0, 0, 1], [0, 0, 0, 0]])], 2)
    np.testing.assert_array_equal(found[:, 3], [0, 1])


def test_a_named_axis_is_taken_whole() -> None:
    graph = record(lambda x: [x[:, 1], x[::-1], x[..., None, 0]], Spec((BATCH, 4), FLOAT))
    for rows in (0, 3):
        x = np.arange(rows * 4.0).reshape(rows, 4)
        for found, expected in zip(
            interpret(graph, [x], rows), (x[:, 1], x[::-1], x[:, None, 0]), strict=True
        ):
            np.testing.assert_array_equal(found, expected)
    for key in (0, slice(1, None)):
        with pytest.raises(ShapeError, match="as long as the batch"):
            record(lambda x, key=key: [x[key]], Spec((BATCH, 4), FLOAT))


def test_tensors_and_variables_are_unpacked() -> None:
    @function
    def swapped(x: Tensor) -> Any:
        first, second = x
        return second - first

    assert swapped(np.array([1.0, 4.0])).numpy() == 3
    first, _ = Variable(np.array([1.0, 2.0]), name="pair")
    assert float(first) == 1


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_joining_agrees_with_numpy(axis: int) -> None:
    y = X[::-1].astype(np.float32)
    for name in ("concatenate", "stack"):
        expected = getattr(np, name)([X, y, X], axis)
        np.testing.assert_array_equal(getattr(ops, name)([X, y, X], axis).numpy(), expected)
    sizes = [1, X.shape[axis] - 1]
    for found, part in zip(ops.split(X, sizes, axis), np.split(X, [1], axis), strict=True):
        np.testing.assert_array_equal(found.numpy(), part)
    np.testing.assert_array_equal(ops.cumsum(X, axis).numpy(), np.cumsum(X, axis))


def test_batches_are_joined_and_cut() -> None:
    def both(x: Tensor, y: Tensor) -> list[Tensor]:
        joined = ops.concatenate([x, y, x])
        parts = ops.split(joined, 3)
        (gradient,) = backward(ops.sum(joined * joined), [y], 1.0)
        return [joined, *parts, gradient, ops.tile(x, (2, 1))]

    spec = Spec((BATCH, 2), FLOAT)
    graph = record(both, spec, spec)
    assert str(graph.nodes[graph.outputs[0]].spec) == "float64(3*batch, 2)"
    for rows in (0, 3):
        x = np.arange(rows * 2.0).reshape(rows, 2)
        joined, *parts, gradient, tiled = interpret(graph, [x, -x], rows)
        np.testing.assert_array_equal(joined, np.concatenate([x, -x, x]))
        for found, part in zip(parts, (x, -x, x), strict=True):
            np.testing.assert_array_equal(found, part)
        np.testing.assert_array_equal(gradient, -2 * x)
        np.testing.assert_array_equal(tiled, np.tile(x, (2, 1)))


def test_take_and_its_gradient_agree_with_numpy() -> None:
    indices = np.array([[3, 0], [-1, 3]])
    for axis, size in enumerate(X.shape):
        taken = indices % size
        np.testing.assert_array_equal(ops.take(X, taken, axis).numpy(), np.take(X, taken, axis))
    table = Variable(np.zeros((5, 3)), name="table")

    @function
    def slope(words: Tensor, weights: Tensor) -> Any:
        (found,) = backward(ops.take(table, words) * weights, [table], 1.0)
        return found

    weights = np.random.default_rng(0).normal(size=(2, 2, 3))
    expected = np.zeros((5, 3))
    np.add.at(expected, indices, weights)
    np.testing.assert_allclose(slope(indices, weights).numpy(), expected)


@pytest.mark.parametrize("index", [5, -6])
def test_an_index_out_of_range_is_named(index: int) -> None:
    with pytest.raises(
        UsageError, match=rf"index {index} at place .1,. of .2,. is outside of -5…4"
    ):
        ops.take(np.ones((5, 2)), [0, index])


def test_top_k_is_stable() -> None:
    x = np.array([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    values, indices = ops.top_k(x, 3)
    assert values.numpy().tolist() == [[3, 3, 2], [0, 0, 0]]
    assert indices.numpy().tolist() == [[1, 2, 3], [0, 1, 2]]
    with pytest.raises(ShapeError, match=r"the last axis of \(2, 4\) has no 5 elements"):
        ops.top_k(x, 5)


@pytest.mark.parametrize("widths", [1, (1, 2), ((0, 1), (2, 0), (0, 0))])
def test_pad_agrees_with_numpy(widths: Any) -> None:
    found = ops.pad(X, widths, value=7).numpy()
    np.testing.assert_array_equal(found, np.pad(X, widths, constant_values=7))


def test_tile_agrees_with_numpy() -> None:
    for repeats in (2, (2, 1), (2, 1, 3, 1), (0, 1, 1)):
        np.testing.assert_array_equal(ops.tile(X, repeats).numpy(), np.tile(X, repeats))


def test_small_integers_are_summed_wide() -> None:
    x = np.full(300, 100, np.uint8)
    assert ops.cumsum(x).numpy()[-1] == 30_000
    assert ops.argmin([3, 1, 1]).numpy() == 1


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("concatenate", ([],), "takes a list of tensors"),
        ("concatenate", ([X, X[:, :2]],), "differ in axes other than 0"),
        ("stack", ([X, X[0]],), "stack needs one shape"),
        ("split", (X, 2), "cannot be cut into 2"),
        ("split", (X, [1, 1]), "cannot be cut into"),
        ("pad", (X, ((1, 1), (1, 1))), "needs a pair of widths for each axis"),
        ("pad", (X, -1), "sizes are 0 or more"),
        ("take", (X, [0.5]), "the indices of take are integers, got float64"),
        ("take_along_axis", (X, [[0]]), r"indices \(1, 1\) do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, arguments: Any, said: str) -> None:
    with pytest.raises((ShapeError, UsageError), match=said):
        getattr(ops, name)(*arguments)
