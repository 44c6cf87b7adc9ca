"""Tasks of a replay against NumPy: the same bits, wherever the arrays of a step lie."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import allreduce.graph  # noqa: F401  # finds NumPy's BLAS
from allreduce import _native

FLOATS = ["float32", "float64"]


def _normal(shape: Any, dtype: str, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _layouts(rows: int, columns: int, dtype: str, seed: int) -> list[np.ndarray]:
    """Give a matrix as it may lie: by rows, by columns, in another one, and unfit for BLAS."""
    wide = _normal((rows + 3, 2 * columns + 5), dtype, seed)
    tall = _normal((columns + 2, rows + 4), dtype, seed + 1)
    return [
        wide[1 : rows + 1, 2 : columns + 2].copy(),
        wide[1 : rows + 1, 2 : columns + 2],
        tall[:columns, 3 : rows + 3].T,
        wide[:rows, : 2 * columns : 2],
        wide[rows - 1 :: -1, :columns],
    ]


def _once(replay: _native.Replay, given: list[np.ndarray]) -> None:
    assert replay.begin(given)
    assert replay.run(0, len(replay)) == -1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(32, 64, 10), (2, 2, 2), (100, 7, 33), (128, 300, 65)])
def test_products_have_the_bits_of_matmul(sizes: tuple[int, int, int], dtype: str) -> None:
    n, k, m = sizes
    done = 0
    for a, b in product(_layouts(n, k, dtype, 1), _layouts(k, m, dtype, 5)):
        out = np.full((n, m), np.nan, dtype)
        replay = _native.Replay([a], [])
        if replay.add_product(out, a, b):
            done += 1
            _once(replay, [a])
            np.testing.assert_array_equal(out, np.matmul(a, b))
    assert done == 9  # of layouts that BLAS takes


@pytest.mark.parametrize("dtype", FLOATS)
def test_stacks_of_products_have_the_bits_of_matmul(dtype: str) -> None:
    q, k = _normal((5, 16, 3, 8), dtype, 1), _normal((5, 16, 3, 8), dtype, 2)
    pairs = [
        (q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1)),
        (q.transpose(0, 2, 1, 3), k[:1].transpose(0, 2, 3, 1)),
        (q.transpose(0, 2, 1, 3), k[0, :, 0, :].T),
        (q[0, :, 0, :], k.transpose(0, 2, 3, 1)),
    ]
    for a, b in pairs:
        expected = np.matmul(a, b)
        out = np.empty_like(expected, order="C", subok=False)
        replay = _native.Replay([], [])
        assert replay.add_product(out, a, b)
        _once(replay, [])
        np.testing.assert_array_equal(out, expected)


def test_what_matmul_computes_in_another_way_is_left_to_it() -> None:
    x = _normal((6, 6), "float32")
    replay = _native.Replay([], [])
    for a, b in [(x, x.T), (x[:1], x), (x, x[:, :1]), (x[:, :1], x[:1]), (x[:0], x)]:
        assert not replay.add_product(np.empty((len(a), b.shape[1]), "float32"), a, b)
    integers = np.ones((6, 6), np.int64)
    assert not replay.add_product(np.empty((6, 6), np.int64), integers, integers.copy())
    assert not replay.add_product(np.empty((6, 6), ">f4"), x.astype(">f4"), x.astype(">f4"))
    assert len(replay) == 0


def test_a_product_is_left_to_matmul_where_both_turn_out_to_be_one() -> None:
    x, y = _normal((6, 6), "float32", 1), _normal((6, 6), "float32", 2)
    for batch in (x, np.stack([x, y])):
        replay = _native.Replay([batch, y], [])
        turned = y.T if batch is x else np.broadcast_to(y.T, (2, 6, 6))
        assert replay.add_product(np.empty_like(batch), batch, turned)
        assert replay.begin([batch, y])
        assert replay.run(0, len(replay)) == -1
        assert replay.begin([batch, batch if batch is x else batch[1]])
        assert replay.run(0, 1) == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "columns"), [(32, 10), (2, 2), (1000, 37), (128, 1024)])
def test_column_sums_have_the_bits_of_a_product_with_ones(
    rows: int, columns: int, dtype: str
) -> None:
    x, out = _normal((rows, columns), dtype), np.empty(columns, dtype)
    replay = _native.Replay([x], [])
    assert replay.add_column_sums(out, x)
    _once(replay, [x])
    np.testing.assert_array_equal(out, np.matmul(np.ones(rows, dtype), x))


def test_what_is_given_may_lie_elsewhere_and_the_rest_moves_with_it() -> None:
    first, second = _normal((4, 6), "float32", 1), _normal((4, 6), "float32", 2)
    out, kept = np.empty((6, 4), "float32"), _normal((6, 4), "float32", 3)
    number = out.dtype.num
    chain = _native.chain([("add", [0, 1], number, 0)], [number, number])
    assert chain is not None
    replay = _native.Replay([first], [])
    assert replay.add_chain(chain, out, [first.T, kept])
    for x in (first, second):
        _once(replay, [x])
        np.testing.assert_array_equal(out, x.T + kept)


def test_what_lies_differently_is_not_begun() -> None:
    x, y, out = np.ones((4, 6), "float32"), np.ones(3, "float32"), np.empty((4, 6), "float32")
    storage = [np.ones(1), np.ones((4, 6), "float32")]
    replay = _native.Replay([x, y], [(storage, 1)])
    assert replay.add_copy(out, x)
    assert replay.begin([x.copy(), y.copy()])
    for other in (
        np.ones((4, 5), "float32"),
        np.ones((4, 6)),
        np.ones((6, 4), "float32").T,
        np.ones((4, 6), ">f4"),
        np.ones((4, 12), "float32")[:, ::2],
    ):
        assert not replay.begin([other, y])
    assert not replay.begin([x])
    storage[1] = storage[1].copy()
    assert not replay.begin([x, y])


def test_a_task_that_refuses_its_input_says_which_it_was() -> None:
    labels, logits = np.array([0, 2, 1]), _normal((3, 3), "float32")
    out = np.empty(3, "float32")
    replay = _native.Replay([labels], [])
    assert replay.add_copy(np.empty(1), np.zeros(1))
    assert replay.add_rows("sparse_softmax_cross_entropy", out, [labels, logits], [])
    _once(replay, [labels])
    assert replay.begin([np.array([0, 3, 1])])
    assert replay.run(0, 2) == 1


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", *FLOATS])
def test_copies_broadcast_and_convert(dtype: str) -> None:
    x = np.array([[0], [1], [3]]).astype(dtype)
    same, floats = np.empty((2, 3, 4), dtype), np.empty((3, 4), "float32")
    replay = _native.Replay([], [])
    assert replay.add_copy(same, x)
    assert replay.add_copy(floats, x)
    _once(replay, [])
    np.testing.assert_array_equal(same, np.broadcast_to(x, (2, 3, 4)))
    np.testing.assert_array_equal(floats, np.broadcast_to(x, (3, 4)))
