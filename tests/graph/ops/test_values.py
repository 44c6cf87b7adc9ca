"""Operators' values against NumPy's, and their dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce.errors import ShapeError, UsageError
from allreduce.graph import function
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core.spec import BATCH, Dim, Spec
from allreduce.graph.core.tensor import ConcreteTensor, Tensor
from allreduce.graph.ops import functions as ops
from tests.graph.interpret import interpret, record

FLOAT = np.dtype(np.float64)
SHAPES = [(), (1,), (3, 4), (0, 3), (2, 1, 3)]
DTYPES = ["float64", "float32", "float16", "int64", "int8", "uint8", "bool"]

BINARY: list[tuple[Callable[..., Tensor], Callable[..., Any]]] = [
    (getattr(ops, name), getattr(np, name))
    for name in (
        *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "matmul"),
        *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
        *("logical_and", "logical_or", "logical_xor"),
        *("floor_divide", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor"),
    )
]
UNARY: list[tuple[Callable[..., Tensor], Callable[..., Any]]] = [
    (getattr(ops, name), getattr(np, name))
    for name in (
        *("negative", "absolute", "sign", "floor", "exp", "log", "sqrt", "square", "tanh"),
        *("logical_not", "isfinite", "isnan", "transpose", "squeeze", "zeros_like", "ones_like"),
        *("sum", "mean"),
    )
] + [
    (ops.relu, lambda x: np.maximum(x, 0)),
    (ops.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    (ops.erf, np.vectorize(math.erf, otypes=[float])),
    (lambda x: ops.expand_dims(x, -1), lambda x: np.expand_dims(x, -1)),
    (lambda x: ops.clip(x, -0.5, 1), lambda x: np.clip(x, -0.5, 1)),
    (
        lambda x: ops.one_hot(ops.cast(abs(x), "int8"), 3, "float64"),
        lambda x: np.eye(3)[abs(x).astype(int)],
    ),
]


untyped: Any = ops  # for calls that mypy would refuse


def value_of(tensor: Tensor) -> np.ndarray:
    assert isinstance(tensor, ConcreteTensor)
    return tensor.value


@pytest.mark.parametrize(("ours", "numpys"), UNARY)
@pytest.mark.parametrize("shape", SHAPES)
def test_unary_agrees_with_numpy(ours: Any, numpys: Any, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).uniform(-2, 2, shape)
    with np.errstate(all="ignore"):
        if x.size == 0 and ours is ops.mean:
            assert np.isnan(value_of(ours(x)))
            return
        expected = numpys(x)
    found = value_of(ours(x))
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    assert found.dtype == np.asarray(expected).dtype


@pytest.mark.parametrize(("ours", "numpys"), BINARY)
@pytest.mark.parametrize("left", DTYPES)
def test_promotion_is_numpys(ours: Any, numpys: Any, left: str) -> None:
    a = np.ones((2, 2), left)
    for right in (*DTYPES, 2, 0.5):
        b: Any = right if not isinstance(right, str) else np.ones((2, 2), right)
        try:
            expected = numpys(a, b)
        except (TypeError, ValueError) as error:
            with pytest.raises((UsageError, type(error))):
                ours(a, b)
            continue
        found = value_of(ours(a, b))
        np.testing.assert_array_equal(found, expected, err_msg=f"{left} and {right}")
        assert found.dtype == expected.dtype, (left, right)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), ()])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions_agree_with_numpy(name: str, axis: Any, keepdims: bool) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    found = value_of(getattr(ops, name)(x, axis, keepdims))
    np.testing.assert_allclose(found, getattr(np, name)(x, axis=axis, keepdims=keepdims))


def test_numpys_integers_are_axes_and_sizes() -> None:
    x, one = np.arange(6.0).reshape(2, 3), np.int64(1)
    assert value_of(untyped.sum(x, axis=one)).tolist() == [3, 12]
    assert value_of(untyped.argmax(x, one)).tolist() == [2, 2]
    assert value_of(untyped.transpose(x, (one, np.int8(-2)))).tolist() == x.T.tolist()
    assert value_of(untyped.reshape(x, np.array([3, -1]))).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert value_of(untyped.one_hot([0], np.uint8(2))).tolist() == [[1, 0]]
    assert value_of(untyped.dropout(x, np.float32(0))).tolist() == x.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_as_wide_as_numpys(dtype: str) -> None:
    x = np.ones((3, 2), dtype)
    for ours, numpys in ((ops.sum, np.sum), (ops.mean, np.mean)):
        assert value_of(ours(x, 0)).dtype == np.asarray(numpys(x, 0)).dtype


def test_python_operators_are_the_operators() -> None:
    x = ops.add([1.0, -2.0], 0)
    three = np.array([3.0, 3.0])
    for found, expected in [
        (three - x, [2, 5]),
        (2 / x, [2, -1]),
        (x @ three, -3),
        (abs(-x), [1, 2]),
        (2.0**x, [2, 0.25]),
        (x > 0, [True, False]),
        (x != x, [False, False]),
        (x // 2, [0, -1]),
        (7 // x, [7, -4]),
        (x % 0.75, [0.25, 0.25]),
        (7.5 % x, [0.5, -0.5]),
        ((x > 0) & (x < 2) | ~(x < 0), [True, False]),
        (True ^ (x > 0), [False, True]),
        (np.array([6, 3]) & ops.cast(x, int), [0, 2]),
    ]:
        np.testing.assert_array_equal(value_of(found), expected)


def test_a_mean_of_many_halves_is_one() -> None:
    many = np.ones(70_000, np.float16)  # more than float16 can count
    for found in (value_of(ops.mean(many)), function(lambda x: ops.mean(x))(many).numpy()):
        assert (found, found.dtype) == (1, np.float16)
    slope = function(lambda x: backward(ops.mean(x), [x], 1.0)[0])(many).numpy()
    np.testing.assert_array_equal(slope, np.full_like(many, 1 / 70_000))
    assert value_of(ops.var(many, ddof=1)) == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_softmax_is_stable(dtype: str) -> None:
    x = np.array([[1000.0, 0.0, -1000.0], [-500, -500, -500]], dtype)
    np.testing.assert_allclose(value_of(ops.softmax(x))[1], [1 / 3] * 3, rtol=1e-3)
    assert value_of(ops.softmax(x))[0].tolist() == [1, 0, 0]
    assert value_of(ops.log_softmax(x))[0].tolist() == [0, -1000, -2000]
    loss = value_of(ops.sparse_softmax_cross_entropy([2, 0], x))
    np.testing.assert_allclose(loss, [2000, math.log(3)], rtol=1e-3)
    assert loss.dtype == dtype


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("classes", [1, 2, 10, 16, 33, 1000])
def test_cross_entropies_agree_with_their_definition(dtype: str, classes: int) -> None:
    generator = np.random.default_rng(classes)
    logits = generator.normal(0, 5, (7, classes)).astype(dtype)
    labels = generator.integers(0, classes, 7)
    wide = logits.astype(np.longdouble)
    expected = np.log(np.exp(wide).sum(1)) - wide[np.arange(7), labels]
    targets = ops.one_hot(labels, classes, dtype)
    for loss in (
        ops.sparse_softmax_cross_entropy(labels, logits),
        ops.softmax_cross_entropy(targets, logits),
    ):
        relative = 1e-6 if dtype == "float32" else 1e-14
        absolute = 80 * float(np.finfo(dtype).eps)  # logits reach 20, and their roundings stay
        np.testing.assert_allclose(value_of(loss), expected, relative, absolute)


def test_a_nan_is_not_hidden() -> None:
    logits = np.zeros((2, 20), np.float32)
    logits[1, 17] = np.nan
    assert np.isnan(value_of(ops.sparse_softmax_cross_entropy([0, 0], logits))).tolist() == [0, 1]
    assert np.isnan(value_of(ops.relu(logits))).sum() == 1
    assert np.isnan(value_of(ops.softmax(logits))).sum() == 20


def test_strided_inputs_are_read_right() -> None:
    x = np.arange(24.0).reshape(4, 6)[::2, 1::2].T
    np.testing.assert_array_equal(value_of(ops.relu(x - 5)), np.maximum(x - 5, 0))
    found = value_of(ops.sparse_softmax_cross_entropy(np.arange(6)[::2] % 2, x))
    dense = value_of(ops.sparse_softmax_cross_entropy([0, 0, 0], x.copy()))
    np.testing.assert_array_equal(found, dense)
    np.testing.assert_array_equal(value_of(ops.reshape(x, (2, 3))), x.reshape(2, 3))
    np.testing.assert_array_equal(value_of(x @ ops.transpose(x)), x @ x.T)


def test_unaligned_inputs_are_read_right() -> None:
    raw = np.zeros(4 * 9 + 1, np.uint8)
    x = raw[1:].view(np.float32)
    x[:] = np.arange(9) - 4
    np.testing.assert_array_equal(value_of(ops.relu(x)), np.maximum(x, 0))


def test_named_sizes_go_through_reshapes() -> None:
    def shapes(x: Tensor) -> list[Tensor]:
        return [
            ops.flatten(x),
            ops.reshape(x, -1),
            ops.reshape(x, (x.shape[0], 2, -1)),
            ops.reshape(x, (-1, 2)),
            ops.squeeze(ops.expand_dims(x, 0)),
        ]

    graph = record(shapes, Spec((BATCH, 4, 3), FLOAT))
    printed = [str(graph.nodes[i].spec) for i in graph.outputs]
    assert printed == [
        "float64(batch, 12)",
        "float64(12*batch,)",
        "float64(batch, 2, 6)",
        "float64(6*batch, 2)",
        "float64(batch, 4, 3)",
    ]
    for batch in (0, 1, 3):
        x = np.arange(batch * 12.0).reshape(batch, 4, 3)
        for result in interpret(graph, [x], batch):
            np.testing.assert_array_equal(result.reshape(-1), x.reshape(-1))
    with pytest.raises(ShapeError, match=r"\(batch, 4, 3\) to \(24, -1\)"):
        record(lambda x: [ops.reshape(x, (24, -1))], Spec((BATCH, 4, 3), FLOAT))


def test_an_empty_axis_survives_a_reshape_with_a_named_size() -> None:
    graph = record(lambda x: [ops.reshape(x, (x.shape[0], 0))], Spec((BATCH, 2, 0), FLOAT))
    assert interpret(graph, [np.empty((3, 2, 0))], 3)[0].shape == (3, 0)


EMPTY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "known again": lambda x, w: ops.reshape(ops.reshape(x, -1), (x.shape[0], 0)),
    "merged": lambda x, w: ops.flatten(x @ w),
    "product": lambda x, w: x @ w,
    "no rows": lambda x, w: ops.transpose(x, (0, 2, 1)) @ np.ones((2, 4)),
    "three": lambda x, w: ops.reshape(x, (-1, x.shape[0], 3)),
    "tiled": lambda x, w: ops.tile(x, (1, 2, 0)),
    "no times": lambda x, w: ops.tile(x, (0, 1, 3)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_what_has_no_elements_has_the_running_batch(name: str) -> None:
    def slopes(x: Tensor, w: Tensor) -> list[Tensor]:
        y = EMPTY[name](x, w)
        return [y, *backward(ops.sum(y * y) + ops.sum(x) + ops.sum(w), [x, w], 1.0)]

    x, w = np.ones((3, 2, 0)), np.ones((0, 4))
    named = record(slopes, Spec((BATCH, 2, 0), FLOAT), Spec((0, 4), FLOAT))
    fixed = record(slopes, Spec((3, 2, 0), FLOAT), Spec((0, 4), FLOAT))
    for one, other in zip(interpret(named, [x, w], 3), interpret(fixed, [x, w]), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def test_named_sizes_that_are_on_both_sides_cancel() -> None:
    def shapes(x: Any, n: int | Dim) -> list[Tensor]:
        return [
            ops.reshape(x, (n, 4 * n)),
            ops.reshape(x, (n, -1)),
            ops.reshape(x, (2 * n, 2, n)),
            ops.reshape(x, (n, n, -1)),
        ]

    graph = record(lambda x: shapes(x, BATCH), Spec((BATCH, 4, BATCH), FLOAT))
    interpret(graph, [np.empty((0, 4, 0))], 0)
    for batch in (1, 3):
        x = np.arange(4.0 * batch * batch).reshape(batch, 4, batch)
        for found, wanted in zip(interpret(graph, [x], batch), shapes(x, batch), strict=True):
            np.testing.assert_array_equal(found, wanted.numpy(), strict=True)
    said = r"\(batch, 4, batch\) to \(batch, 4\): 4\*batch\*batch elements are not 4\*batch"
    with pytest.raises(ShapeError, match=said):
        record(lambda x: [ops.reshape(x, (BATCH, 4))], Spec((BATCH, 4, BATCH), FLOAT))


def test_size_and_mean_know_the_running_batch() -> None:
    graph = record(
        lambda x: [ops.size(x), ops.size(x, 0, "float32"), ops.mean(x)], Spec((BATCH, 2), FLOAT)
    )
    count, rows, mean = interpret(graph, [np.full((5, 2), 3.0)], 5)
    assert [float(x) for x in (count, rows, mean)] == [10, 5, 3]
    assert rows.dtype == np.float32


def test_logits_of_finds_a_softmax_over_the_last_axis() -> None:
    def traced(x: Tensor) -> list[Tensor]:
        found = ops.logits_of(ops.softmax(x))
        assert found is not None
        assert ops.logits_of(ops.softmax(x, axis=0)) is None
        assert ops.logits_of(ops.tanh(x)) is None
        return [found]

    graph = record(traced, Spec((2, 3), FLOAT))
    assert graph.outputs == graph.inputs
    assert ops.logits_of(ops.softmax(np.ones(3))) is None
