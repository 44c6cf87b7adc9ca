"""Dropout's generator and its independence of how rows are shared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from allreduce import _native
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core.node import Graph
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.core.tensor import ConcreteTensor, Tensor
from allreduce.graph.ops import functions as ops
from tests.graph.interpret import interpret, record

FLOAT = np.dtype(np.float64)

# Published with the paper's code (Random123, kat_vectors, philox4x32-10): counter, key, words.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def _words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


def _philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Compute the four random words of each counter (columns), with Python's integers."""
    low, high = key & 0xFFFFFFFF, key >> 32
    c = [[int(word) for word in row] for row in counter]
    for _ in range(10):
        for i in range(len(c[0])):
            a, b = 0xD2511F53 * c[0][i], 0xCD9E8D57 * c[2][i]
            c[0][i], c[1][i] = b >> 32 ^ c[1][i] ^ low, b & 0xFFFFFFFF
            c[2][i], c[3][i] = a >> 32 ^ c[3][i] ^ high, a & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return np.array(c, np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_reference_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    low, high = (int(word) for word in _words(key))
    found = _philox(_words(counter)[:, None], low | high << 32)
    np.testing.assert_array_equal(found[:, 0], _words(expected))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_draws_philoxs_words(rate: float) -> None:
    key, row, step, columns = 0x299F31D0A4093822, 2**32 + 5, 7, 201
    x = np.ones((1, columns), np.float32)
    kept = np.empty_like(x)
    _native.run_rows("dropout", kept, [x, np.array(row), np.array(step)], [rate, key, 1])
    places = np.arange(columns)
    counters = np.unique(16 * (places // 64) + places % 16)
    fixed = [np.full_like(counters, word) for word in (row % 2**32, row >> 32, step)]
    words = _philox(np.array([counters, *fixed]), key)
    drawn = words[places % 64 // 16, np.searchsorted(counters, 16 * (places // 64) + places % 16)]
    np.testing.assert_array_equal(kept[0] > 0, drawn >= int(rate * 2**32))


def _dropped(shape: tuple[int, ...] = (5,)) -> Graph:
    return record(lambda x: [ops.dropout(x, 0.3, seed=7)], Spec((BATCH, *shape), FLOAT))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (8, 8), (201,)])
def test_the_mask_does_not_depend_on_how_rows_are_split(shape: tuple[int, ...]) -> None:
    graph, x = _dropped(shape), np.ones((12, *shape))
    (whole,) = interpret(graph, [x], 12, {"row_offset": 0, "step": 3})
    cuts = [0, 1, 1, 6, 12]
    parts = [
        interpret(graph, [x[a:b]], b - a, {"row_offset": a, "step": 3})[0]
        for a, b in pairwise(cuts)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def _merged(x: Tensor) -> Tensor:
    return ops.reshape(ops.dropout(ops.reshape(x, (-1, 5)), 0.5, seed=1), (-1, 4, 5))


def _flat(x: Tensor) -> Tensor:
    return ops.reshape(ops.dropout(ops.reshape(x, -1), 0.5, seed=1), (-1, 4, 5))


def _in_the_middle(x: Tensor) -> Tensor:
    return ops.transpose(ops.dropout(ops.transpose(x, (1, 0, 2)), 0.5, seed=1), (1, 0, 2))


def _last(x: Tensor) -> Tensor:
    return ops.transpose(ops.dropout(ops.transpose(x), 0.5, seed=1))


@pytest.mark.parametrize("layout", [_merged, _flat, _in_the_middle, _last])
def test_one_and_three_replicas_drop_the_same_wherever_the_batch_axis_is(
    layout: Callable[[Tensor], Tensor],
) -> None:
    def both(x: Tensor) -> list[Tensor]:
        y = layout(x)
        return [y, *backward(y, [x], 1.0)]

    graph, x = record(both, Spec((BATCH, 4, 5), FLOAT)), np.ones((6, 4, 5))
    whole = interpret(graph, [x], 6, {"row_offset": 0, "step": 3})
    cuts = [0, 3, 4, 6]
    parts = [
        interpret(graph, [x[a:b]], b - a, {"row_offset": a, "step": 3}) for a, b in pairwise(cuts)
    ]
    for position, expected in enumerate(whole):
        assert len({sample.tobytes() for sample in expected}) == 6  # each its own draw
        found = np.concatenate([part[position] for part in parts])
        np.testing.assert_array_equal(found, expected)


def test_replicas_drop_the_same_of_what_has_no_batch_axis() -> None:
    graph = record(lambda w: [ops.dropout(w, 0.5, seed=1)], Spec((8, 8), FLOAT))
    results = [
        interpret(graph, [np.ones((8, 8))], 2, {"row_offset": offset, "step": 3})[0]
        for offset in (0, 2, 4)
    ]
    np.testing.assert_array_equal(results, [results[0]] * 3)


def test_the_mask_depends_on_seed_operator_step_and_row() -> None:
    def several(x: Tensor) -> list[Tensor]:
        return [ops.dropout(x, 0.5, seed=7), ops.dropout(x, 0.5, 7), ops.dropout(x, 0.5, seed=8)]

    graph = record(several, Spec((BATCH, 64), FLOAT))
    x = np.ones((2, 64))
    first = interpret(graph, [x], 2, {"row_offset": 0, "step": 1})
    later = interpret(graph, [x], 2, {"row_offset": 0, "step": 2})
    rows = {row.tobytes() for result in (*first, *later) for row in result}
    assert len(rows) == 12
    again = interpret(graph, [x], 2, {"row_offset": 0, "step": 1})
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_and_the_scale_are_right(dtype: str, rate: float) -> None:
    found = ops.dropout(np.full((100, 1000), 2, dtype), rate, seed=1)
    assert isinstance(found, ConcreteTensor)
    kept = found.value != 0
    deviation = (rate * (1 - rate) / kept.size) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation
    assert np.unique(found.value[kept]).tolist() == [np.dtype(dtype).type(2 / (1 - rate))]


def test_the_gradient_uses_the_same_mask() -> None:
    def both(x: Tensor) -> list[Tensor]:
        y = ops.dropout(x, 0.4, seed=3)
        return [y, *backward(y, [x], 1.0)]

    graph = record(both, Spec((BATCH, 33), FLOAT))
    value, gradient = interpret(graph, [np.ones((4, 33))], 4, {"row_offset": 9, "step": 5})
    np.testing.assert_array_equal(value, gradient)


def test_rate_zero_keeps_everything() -> None:
    graph = record(lambda x: [ops.dropout(x, 0, seed=0)], Spec((2,), FLOAT))
    assert len(graph.nodes) == 1
