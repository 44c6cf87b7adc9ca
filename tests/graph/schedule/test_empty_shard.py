"""Replicas without samples count for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import ShapeError, UsageError

X = np.random.default_rng(5).normal(size=(3, 3))


def _strategy(replicas: int) -> ar.Strategy:
    ar.config.set_logical_devices("CPU", 4)
    return ar.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def _run(strategy: ar.Strategy, step: Any, *arrays: np.ndarray, eagerly: bool = False) -> Any:
    (batch,) = strategy.distribute_dataset([arrays])
    return strategy.run(ar.function(step), args=batch, eagerly=eagerly)


def test_what_reads_a_collective_waits_for_it_though_its_first_reader_is_left_out() -> None:
    strategy = _strategy(3)
    with strategy.scope():
        total = ar.Variable(np.zeros(1 << 18), name="total")

    @ar.function
    def step(x: Any) -> Any:
        everyones = ar.all_reduce(ar.ops.sum(x, axis=0))
        own = ar.ops.sum(x - everyones, axis=1)  # there is none on the third
        total.assign(everyones * 1.5)
        return own

    for number in range(1, 6):
        (batch,) = strategy.distribute_dataset([(np.full((2, 1 << 18), float(number)),)])
        strategy.run(step, args=batch)
        for value in total.storage:
            np.testing.assert_array_equal(value, 3.0 * number)


def _of_a_scalar(x: Any, w: Any) -> Any:
    return ar.ops.square(ar.all_reduce(ar.ops.sum(x * w))) * 0.01


def _of_rows(x: Any, w: Any) -> Any:
    return ar.ops.sum(ar.ops.square(ar.all_gather(x * w) - 0.7), axis=1)


def _of_a_vector(x: Any, w: Any) -> Any:
    return ar.ops.square(ar.all_reduce(ar.ops.sum(x * w, axis=0))) * 0.01


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("loss", [_of_a_scalar, _of_rows, _of_a_vector])
def test_gradients_through_collectives_do_not_depend_on_empty_shares(
    loss: Any, eagerly: bool
) -> None:
    def change(replicas: int) -> np.ndarray:
        strategy = _strategy(replicas)
        with strategy.scope():
            w, optimizer = ar.Variable(np.ones(3), name="w"), ar.optim.SGD(1.0)

        def step(x: Any) -> None:
            # One and the same loss on each busy replica, which the weights make the mean of.
            optimizer.minimize(ar.ops.sum(loss(x, w)), [w], weight=1.0)

        _run(strategy, step, np.ones((3, 3)) * np.arange(1.0, 4.0), eagerly=eagerly)
        for value in w.storage[1:]:
            np.testing.assert_array_equal(value, w.storage[0])
        return 1 - w.numpy()

    assert np.abs(change(3)).min() > 0
    np.testing.assert_allclose(change(4), change(3), rtol=1e-12)


@pytest.mark.parametrize(("simplify", "eagerly"), [(True, False), (False, False), (True, True)])
def test_values_do_not_depend_on_empty_shares(simplify: bool, eagerly: bool) -> None:
    def step(x: Any) -> Any:
        busy = ar.all_reduce(np.float64(1.0))
        rows = ar.all_gather(x) + 1.0
        twice = ar.all_reduce(ar.ops.sum(ar.all_gather(x) * 1.0))
        return ar.all_reduce(ar.ops.mean(x)) / busy, rows, ar.ops.sum(rows, axis=0), twice

    ar.config.passes["simplify"] = simplify
    try:
        mean, rows, total, twice = _run(_strategy(4), step, np.full((3, 2), 6.0), eagerly=eagerly)
    finally:
        ar.config.passes["simplify"] = True
    for values in zip(mean.values, rows.values, total.values, twice.values, strict=True):
        assert values[0] == 6.0
        np.testing.assert_array_equal(values[1], np.full((3, 2), 7.0))
        np.testing.assert_array_equal(values[2], [21.0, 21.0])
        assert values[3] == 3 * 36.0  # of three replicas


def test_what_is_made_of_everybodys_rows_may_be_assigned() -> None:
    strategy = _strategy(4)
    with strategy.scope():
        mean = ar.Variable(np.zeros(3), name="mean")
    _run(strategy, lambda x: mean.assign(ar.ops.mean(ar.ops.tanh(ar.all_gather(x)), axis=0)), X)
    for value in mean.storage:
        np.testing.assert_allclose(value, np.tanh(X).mean(axis=0))


def test_draws_for_everybodys_rows_are_the_same_on_all() -> None:
    def drawn(replicas: int) -> list[np.ndarray]:
        def step(x: Any) -> Any:
            rows = ar.all_gather(x)
            noise = ar.ops.normal(rows.shape, 0.0, 1.0, "float64", seed=2)
            return ar.ops.dropout(ar.ops.exp(rows), 0.5, seed=1) + noise

        return list(_run(_strategy(replicas), step, X).values)

    wanted = drawn(2)
    np.testing.assert_array_equal(wanted[0], wanted[1])
    for value in drawn(4):
        np.testing.assert_array_equal(value, wanted[0])


def _sum_of_rows(x: Any, rows: Any) -> Any:
    """Add up, within two scans, a one for each of `rows`."""

    def inner(h: Any, _: Any) -> Any:
        return h + rows(ar.ops.ones((x.shape[0],))), None

    def outer(h: Any, _: Any) -> Any:
        return ar.scan(inner, h, length=2)

    return ar.scan(outer, np.float64(0.0), length=1)[0]


def test_what_is_made_of_own_rows_within_a_scan_is_not_assigned() -> None:
    strategy = _strategy(3)
    with strategy.scope():
        total = ar.Variable(np.zeros(()), name="total")
    with pytest.raises(UsageError, match="'total' would be assigned a value that depends on"):
        _run(strategy, lambda x: total.assign(_sum_of_rows(x, ar.ops.sum)), X)


def test_a_replica_without_samples_does_not_scan_over_its_rows() -> None:
    def step(x: Any) -> Any:
        return ar.all_reduce(_sum_of_rows(x, ar.ops.max))

    assert list(_run(_strategy(4), step, X).values) == [6.0] * 4


def test_a_scan_may_be_the_only_one_to_know_of_everybodys_rows() -> None:
    strategy = _strategy(2)

    @ar.function
    def step(x: Any) -> Any:
        return _sum_of_rows(ar.all_gather(x), ar.ops.sum)

    for rows in ((2, 2), (2, 1), (2, 0)):  # on replica 0 always as many
        batch = ar.PerReplica(tuple(np.ones((each, 2)) for each in rows), rows_per_replica=rows)
        found = strategy.run(step, args=(batch,))
        assert list(found.values) == [2.0 * sum(rows)] * 2


def test_rows_that_are_not_on_the_first_axis_are_not_joined() -> None:
    with pytest.raises(ShapeError, match=r"all_gather of \(3, batch\).*transpose before, and back"):
        _run(_strategy(2), lambda x: ar.all_gather(ar.ops.transpose(x)), X)
