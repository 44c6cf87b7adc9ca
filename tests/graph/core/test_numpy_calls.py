"""NumPy's functions and operators on tensors and variables, traced and at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import ShapeError, UsageError
from allreduce.graph import Variable, function, ops
from allreduce.graph.core.numpy_calls import OPERATOR_OF
from allreduce.graph.core.tensor import ConcreteTensor

X = np.random.default_rng(3).normal(size=(4, 3))
W = np.random.default_rng(4).normal(size=(3, 2))

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "ufuncs": lambda x, w: np.add(np.multiply(x, 2.0), np.exp(-np.absolute(x))),
    "arrays first": lambda x, w: np.ones(3) * x - np.float32(2) / np.square(x),
    "matrices": lambda x, w: np.matmul(x, w) @ np.ones((2, 5)),
    "powers": lambda x, w: np.sqrt(x**2) + np.power(np.sign(x) + 2, 1.5),
    "truth": lambda x, w: np.where(np.logical_and(x > 0, np.isfinite(x)), x, np.tanh(x)),
    "sum": lambda x, w: np.sum(x, axis=1) + np.sum(a=x),
    "mean": lambda x, w: np.mean(x, 0, keepdims=True),
    "spread": lambda x, w: np.var(x, 0, ddof=1) + np.std(x, axis=1, keepdims=True) - np.var(w),
    "extremes": lambda x, w: np.max(x, axis=-1) - np.min(x, axis=(0, 1)) + np.amax(w) - np.amin(w),
    "argmax": lambda x, w: np.argmax(x) + np.argmax(w, axis=1),
    "parts": lambda x, w: np.concatenate([x, np.take(x, [0, -1], axis=0)])[1:, ::2],
    "stacked": lambda x, w: np.stack([np.tile(x, (1, 2)), np.pad(x, ((0, 0), (1, 2)))], axis=1),
    "cumulated": lambda x, w: np.cumsum(x) + np.argmin(x) + np.take(x, 5),
    "along": lambda x, w: np.take_along_axis(x, np.array([[0], [2], [1], [1]]), axis=1),
    "circular": lambda x, w: np.sin(x) * np.cos(x) + np.log1p(abs(x)) - np.expm1(x),
    "clip": lambda x, w: np.clip(x, a_min=-0.5, a_max=0.5),
    "shapes": lambda x, w: np.squeeze(np.expand_dims(np.transpose(np.reshape(x, (2, 6))), 0)),
    "shape by name": lambda x, w: np.reshape(np.ravel(x), shape=(3, 4)),
    "broadcast": lambda x, w: np.broadcast_to(w, (2, 3, 2)) + np.ones_like(w) + np.zeros_like(w),
    "whole": lambda x, w: np.floor_divide(x, 0.3) * 10 + np.remainder(x, w[0, 0]) + np.mod(3, x),
    "rest": lambda x, w: x // 2 + x % 0.7 - 1 // x + 5 % (x + 9),
    "bits": lambda x, w: (x > 0) & (x < 1) | ~(x > -1) ^ True,
    "integers": lambda x, w: np.argmax(x, 0) & 3 | 4 ^ ~np.argmax(w, 1),
    "parity": lambda x, w: np.logical_xor(x > 0, np.bitwise_or(x < 1, np.isnan(x) | np.isinf(x))),
    "cut": lambda x, w: np.split(x, 2)[1] - np.split(x, [1], axis=1)[0][:2],
    "cut out": lambda x, w: np.split(x, (1, 2, 9), axis=-1)[1] + len(np.split(x, np.array([1]))),
    "turned": lambda x, w: np.flip(x) + np.flip(x, 0) + np.flip(x, (0, -1)),
    "swapped": lambda x, w: np.swapaxes(x, 0, -1) + np.moveaxis(x, 0, 1),
    "moved": lambda x, w: np.moveaxis(x[None, ..., None] * np.ones(2), (0, -1), (-1, 1)),
    "piled": lambda x, w: np.vstack([x, x[0], np.hstack((x[:, :1], x[:, 1:]))]),
    "in a row": lambda x, w: np.hstack([x[0], x[1, 0], w[0]]),
    "filled": lambda x, w: (
        np.full_like(x, 2.5) + np.full_like(w, x[0, :2], dtype="float32")[:1, :1]
    ),
    "copied": lambda x, w: np.copy(x) + x,
    "sizes": lambda x, w: x * (np.ndim(x) + np.shape(w)[1]) + np.size(x, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_traced_to_what_numpy_gives(name: str) -> None:
    traced = function(CALLS[name])(X, W)
    assert isinstance(traced, ConcreteTensor)
    np.testing.assert_allclose(traced.numpy(), CALLS[name](X, W))


def test_every_name_is_one_of_numpys() -> None:
    assert all(getattr(np, each.__name__) is each for each in OPERATOR_OF)


def test_a_variable_is_taken_and_remembered_by_the_trace() -> None:
    w = Variable(W.copy(), name="w")

    @function
    def product(x: Any) -> Any:
        return np.matmul(x, w)

    first = product(X).numpy()
    w.assign(2 * W)
    np.testing.assert_allclose(product(X).numpy(), 2 * first)


LACKING: dict[str, Callable[[Any], Any]] = {
    "median": np.median,
    "norm": lambda x: np.linalg.norm(x),
    "reduce": np.add.reduce,
    "fmod": lambda x: np.fmod(np.ones((4, 3)), x),
}


@pytest.mark.parametrize("third", [np.float32, None, True])
@pytest.mark.parametrize("call", [np.sum, np.mean])
def test_a_dtype_by_position_is_not_taken_for_keepdims(call: Any, third: Any) -> None:
    with pytest.raises(UsageError, match=r"_calls\.py:\d+: np\..* takes a, axis, keepdims"):
        function(lambda x: call(x, 0, third))(X)


@pytest.mark.parametrize("name", LACKING)
@pytest.mark.parametrize("of_variable", [False, True])
def test_what_has_no_operator_is_refused_in_a_trace(name: str, of_variable: bool) -> None:
    w = Variable(X.copy(), name="w")

    @function
    def step(x: Any) -> Any:
        return LACKING[name](w if of_variable else x)

    with pytest.raises(UsageError, match=r"test_numpy_calls.py:\d+: np.* has no operator"):
        step(X)


WRITING: dict[str, Callable[[Any], Any]] = {
    "copyto": lambda w: np.copyto(w, 1.0),
    "copyto by name": lambda w: np.copyto(src=1.0, dst=w),
    "at": lambda w: np.add.at(w, 0, 5.0),
    "put": lambda w: np.put(w, [0], 9.0),
    "diagonal": lambda w: np.fill_diagonal(w, 1.0),
    "out": lambda w: np.add(X, 1.0, out=w),
    "out by place": lambda w: np.sum([w, w], 0, None, w),
    "accumulated": lambda w: np.add.accumulate(X, out=w),
}


@pytest.mark.parametrize("name", WRITING)
def test_what_would_write_into_a_copy_is_refused(name: str) -> None:
    for written in (Variable(X.copy(), name="w"), ops.exp(X)):
        with pytest.raises(UsageError, match=r"test_numpy_calls.py:\d+: np.* cannot write into"):
            WRITING[name](written)


def test_what_an_operator_does_not_take_is_said() -> None:
    @function
    def wide(x: Any) -> Any:
        return np.sum(x, dtype="float64")

    with pytest.raises(UsageError, match=r"np\.sum of tensors takes a, axis, keepdims: .*'dtype'"):
        wide(X)


def test_on_values_the_rest_of_numpy_works_too() -> None:
    tensor: Any
    variable: Any
    tensor, variable = ops.exp(X), Variable(np.ones((4, 2)), name="w")
    assert np.median(tensor) == np.median(np.exp(X))
    np.testing.assert_array_equal(np.add.reduce(tensor), np.add.reduce(np.exp(X)))
    assert np.concatenate([tensor, variable], axis=1).shape == (4, 5)
    into = np.zeros_like(X)
    into += tensor
    np.testing.assert_array_equal(into, np.exp(X))
    np.testing.assert_array_equal(np.sort(variable), np.ones((4, 2)))


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda x: np.sum(x, dtype="float32"),
    "initial": lambda x: np.max(x, initial=9.0),
    "bounds": lambda x: np.clip(x, 0, None) + np.clip(x, np.zeros(3), np.ones(3)),
    "one argument": lambda x: np.where(x),
    "mode": lambda x: np.pad(x, 1, mode="edge"),
    "order": lambda x: np.reshape(x, (3, 4), order="F"),
    "all axes": lambda x: np.concatenate([x, x], axis=None),
    "another dtype": lambda x: np.zeros_like(x, dtype=int),
    "sizes": lambda x: list(range(np.size(x))),
    "a copy to be written to": lambda x: np.add(written := np.copy(x), 1, out=written),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_on_values_numpy_does_what_an_operator_does_not(name: str) -> None:
    for value in (Variable(X.copy(), name="w"), ops.add(X, 0.0)):
        np.testing.assert_array_equal(UNKNOWN[name](value), UNKNOWN[name](X), strict=True)


def test_on_values_too_shapes_that_do_not_fit_are_told_with_the_users_line() -> None:
    values: Any = (ops.exp(X), ops.exp(W))
    with pytest.raises(ShapeError, match=r"test_numpy_calls.py:\d+: add: shapes"):
        np.add(*values)


def test_rows_are_turned_and_piled_whatever_the_batch_is() -> None:
    def step(x: Any) -> Any:
        return np.flip(x), np.moveaxis(x, 0, 1), np.vstack([x, x]), np.split(x, 3, axis=1)[1]

    strategy = ar.MirroredStrategy(["CPU:0"])
    found = strategy.run(function(step), args=(ar.PerReplica((X,)),))
    for one, wanted in zip(found, step(X), strict=True):
        np.testing.assert_array_equal(one.values[0], wanted)


def test_a_traced_tensor_goes_into_no_array() -> None:
    into = np.zeros((4, 3))

    @function
    def add(x: Any) -> Any:
        np.add(x, 1, out=into)
        return x

    with pytest.raises(UsageError, match=r"np\.add inside ar\.function makes a new tensor"):
        add(X)
