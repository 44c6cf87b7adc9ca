"""Steps replayed in native code compute, refuse and keep the same as NumPy's steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce import events, ops
from allreduce._native import Replay
from allreduce.graph.core.node import Node
from allreduce.graph.core.spec import Spec
from allreduce.graph.execute import bound_program, native_lowering
from allreduce.graph.replicate.owner import default_replicator


def _batches(count: int, rows: int = 16) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(1)
    return [
        (generator.normal(size=(rows, 12)).astype("float32"), generator.integers(0, 5, rows))
        for _ in range(count)
    ]


@contextmanager
def _in_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(bound_program, "_MOST_REPLAYS", 0)
        yield


def _replayed(fn: Any) -> bool:
    """Say whether a function's latest step has a part in native code."""
    compiled = default_replicator().latest(fn)
    assert compiled is not None
    latest = compiled.executors[0].latest
    return latest is not None and latest._replay is not None


def _network() -> tuple[Callable[..., Any], list[ar.Variable]]:
    generator = np.random.default_rng(0)
    sizes = [(12, 33), (33,), (33, 5), (5,)]
    variables = [ar.Variable(generator.normal(size=size).astype("float32")) for size in sizes]
    optimizer = ar.optim.Adam(0.01)

    @ar.function
    def step(x: Any, y: Any) -> Any:
        a, b, c, d = variables
        hidden = ops.dropout(ops.relu(x @ a + b) * 0.5 + 1, 0.3, seed=1)
        loss = ar.nn.losses.sparse_categorical_crossentropy(y, hidden @ c + d, from_logits=True)
        optimizer.minimize(loss, variables)
        return loss, ops.transpose(x, (1, 0)), ops.mean(hidden, axis=0)

    return step, variables


def _train(batches: Any) -> list[np.ndarray]:
    step, variables = _network()
    made = [np.asarray(each) for x, y in batches for each in step(x, y)]
    return [*made, *(each.numpy() for each in variables)]


def test_a_network_is_trained_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = _batches(6)
    with _in_numpy(monkeypatch):
        expected = _train(batches)
    for one, other in zip(_train(batches), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_operators_of_rows_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [batch[0] for batch in _batches(3)]

    def run() -> list[np.ndarray]:
        @ar.function
        def step(x: Any) -> Any:
            rows, whole = ops.normalize(x, axis=-1), ops.normalize(x, axis=(0, 1))
            return ops.softmax(rows) + whole, ops.erf(x), *ar.gradients(ops.normalize(x) ** 3, [x])

        made = [np.asarray(each) for batch in x for each in step(batch)]
        assert _replayed(step) or bound_program._MOST_REPLAYS == 0
        return made

    with _in_numpy(monkeypatch):
        expected = run()
    for one, other in zip(run(), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("attrs", "added"),
    [({}, True), ({"axes": (1,)}, True), ({"axes": (0,)}, False), ({"axis": 0}, False)],
)
def test_row_kernels_are_not_replayed_with_attributes_that_they_do_not_know(
    attrs: dict[str, Any], added: bool
) -> None:
    x = _batches(1)[0][0]
    out, replay = np.empty_like(x), Replay([x], [])
    node = Node(0, "softmax", (), attrs, Spec(x.shape, x.dtype))
    assert native_lowering.add(replay, node, out, [x]) == added
    assert len(replay) == added


def test_it_takes_inputs_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = _batches(8)
    wide = np.zeros((16, 24), "float32")
    both = np.zeros((17, 12), "float32")
    for index, (x, y) in enumerate(batches):
        wide[:, ::2], both[1:] = x, x
        lying = [x, wide[:, ::2], both[1:], np.asfortranarray(x)][index % 4]
        batches[index] = (lying.copy(order="K") if index % 2 else lying, y)
    with _in_numpy(monkeypatch):
        expected = _train(batches[-4:])
    for one, other in zip(_train(batches[-4:]), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_input_given_twice_is_read_as_both() -> None:
    @ar.function
    def product(a: Any, b: Any) -> Any:
        return a @ ops.transpose(b, (1, 0))

    x, y = (batch[0] for batch in _batches(2))
    for a, b in [(x, y), (x, y), (x, x), (y, x), (y, y)]:
        np.testing.assert_array_equal(np.asarray(product(a, b)), a @ b.T)


def test_inputs_may_be_columns_of_one_array() -> None:
    @ar.function
    def total(x: Any, y: Any) -> Any:
        return x * 2 + ops.reshape(y, (-1, 1)), ops.transpose(x, (1, 0)) @ x, x @ x[:11]

    for _ in range(4):
        for table in (_batches(1, 18)[0][0], _batches(2, 18)[1][0]):
            x, y = table[:, 1:], table[:, 0]
            expected = x * 2 + y.reshape(-1, 1), x.T @ x, x @ x[:11]
            for one, other in zip(total(x, y), expected, strict=True):
                np.testing.assert_array_equal(np.asarray(one), other)
    assert _replayed(total)


def test_what_reads_a_value_that_is_somewhere_new_is_replayed() -> None:
    @ar.function
    def step(x: Any) -> Any:
        flat = ops.reshape(x, (-1,))  # a copy, in memory of its own
        y = flat + 1
        return y, y * flat, ops.square(y) - 3

    for x, _ in _batches(5):
        flat = x.reshape(-1)
        y = flat + 1
        given = np.asfortranarray(x)
        for one, other in zip(step(given), (y, y * flat, np.square(y) - 3), strict=True):
            np.testing.assert_array_equal(np.asarray(one), other)
    assert _replayed(step)


def test_a_label_out_of_range_is_told_as_ever() -> None:
    step, variables = _network()
    for x, y in _batches(3):
        step(x, y)
    assert _replayed(step)
    before = [each.numpy() for each in variables]
    (x, y), *_ = _batches(1)
    with pytest.raises(ar.UsageError, match=r"test_native_replay\.py:\d+: .*label 7 in row 2 of"):
        step(x, np.where(np.arange(16) == 2, 7, y))
    for variable, old in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)
    step(x, y)


def test_a_refused_label_may_come_from_a_view_of_the_input() -> None:
    @ar.function
    def loss(x: Any, y: Any) -> Any:
        return ar.nn.losses.sparse_categorical_crossentropy(y, x, from_logits=True)

    x, y = _batches(1)[0]
    for _ in range(3):
        loss(x, y.reshape(-1, 1))
    with pytest.raises(ar.UsageError, match="label -1 in row 0"):
        loss(x, np.full((16, 1), -1))


def test_a_variable_that_another_optimizer_moves_is_found() -> None:
    variable = ar.Variable(np.ones(4, "float32"))

    @ar.function
    def read(x: Any) -> Any:
        return variable * x + variable

    @ar.function
    def change(x: Any) -> None:
        optimizer.minimize(ops.mean(variable * x), [variable])

    x = np.arange(4, dtype="float32")
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(read(x)), x + 1)
    optimizer = ar.optim.SGD(1.0)
    for _ in range(3):
        change(np.ones(4, "float32"))
        expected = variable.numpy()
        np.testing.assert_array_equal(np.asarray(read(x)), expected * x + expected)
    variable.assign(np.full(4, 3, "float32"))
    np.testing.assert_array_equal(np.asarray(read(x)), 3 * x + 3)


def test_a_value_that_is_assigned_may_be_a_view_of_the_variable() -> None:
    variable = ar.Variable(np.arange(9, dtype="float32").reshape(3, 3))

    @ar.function
    def turn() -> None:
        variable.assign(ops.transpose(variable, (1, 0)))

    expected = variable.numpy()
    for _ in range(4):
        turn()
        expected = expected.T.copy()
        np.testing.assert_array_equal(variable.numpy(), expected)


def test_a_batch_is_not_kept() -> None:
    weights = ar.Variable(np.ones((12, 3), "float32"))

    @ar.function
    def step(x: Any) -> Any:
        return ops.transpose(ops.transpose(x, (1, 0)) * 2, (1, 0)) @ weights

    kept = []
    for x, _ in _batches(3):
        step(x)
        kept.append(weakref.ref(x))
        del x
    assert _replayed(step)
    gc.collect()
    assert all(each() is None for each in kept)


def test_who_listens_hears_of_every_instruction() -> None:
    step, _ = _network()
    batches = _batches(4)
    for x, y in batches[:3]:
        step(x, y)
    heard: list[str] = []
    stop = events.subscribe(lambda event: heard.append(event.name))
    step(*batches[3])
    stop()
    assert {"sparse_softmax_cross_entropy", "update_bucket"} <= set(heard)


def test_halves_and_what_only_numpy_computes_stay_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @ar.function
    def mixed(x: Any) -> Any:
        half = ops.cast(x, "float16") * 2
        return ops.tanh(x) * x + ops.cast(half, "float32"), ops.sum(ops.exp(x), axis=1)

    x = _batches(1)[0][0]
    made = [[np.asarray(each) for each in mixed(x)] for _ in range(3)]
    expected = np.tanh(x) * x + (x.astype("float16") * np.float16(2)).astype("float32")
    for one, other in made:
        np.testing.assert_array_equal(one, expected)
        np.testing.assert_array_equal(other, made[0][1])
