"""Collectives inside a step: values, gradients, replicas without samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import ShapeError, UnsupportedError, UsageError
from allreduce.graph.trace.replica import StepInfo
from allreduce.graph.trace.signature import take_apart

X = np.random.default_rng(5).normal(size=(7, 3))


@pytest.fixture(params=[1, 2, 4])
def strategy(request: pytest.FixtureRequest) -> ar.Strategy:
    ar.config.set_logical_devices("CPU", 4)
    return ar.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


def _run(strategy: ar.Strategy, step: Any, *arrays: np.ndarray) -> Any:
    (batch,) = strategy.distribute_dataset([arrays])
    return strategy.run(ar.function(step), args=batch)


@pytest.mark.parametrize("rows", [7, 3, 1])
def test_values_are_those_of_the_global_batch(strategy: ar.Strategy, rows: int) -> None:
    def step(x: Any) -> Any:
        total = ar.all_reduce(ar.ops.sum(x, axis=0))
        count = ar.all_reduce(ar.ops.size(x, axis=0))
        return total / count, ar.all_gather(x), ar.all_gather(ar.ops.sum(x * 0, axis=0) + 1)

    mean, gathered, each = _run(strategy, step, X[:rows])
    for value in mean.values:
        np.testing.assert_allclose(value, X[:rows].mean(axis=0))
    for value in gathered.values:
        np.testing.assert_array_equal(value, X[:rows])
    busy = min(rows, strategy.num_replicas_in_sync)
    assert each.values[0].sum() == 3 * busy


@pytest.mark.parametrize("op", ["min", "max", "prod"])
def test_a_replica_without_samples_counts_for_nothing(strategy: ar.Strategy, op: str) -> None:
    def step(x: Any) -> Any:
        return ar.all_reduce(ar.ops.sum(x, axis=0), op=op)

    found = _run(strategy, step, X[:1])
    for value in found.values:
        np.testing.assert_array_equal(value, X[0])


def test_a_contrastive_losss_gradient_is_that_of_the_global_batch(strategy: ar.Strategy) -> None:
    with strategy.scope():
        w = ar.Variable(np.eye(3) + 0.1, name="w")
        optimizer = ar.optim.SGD(0.5)

    def step(x: Any) -> Any:
        own = ar.ops.tanh(x @ w)
        everyones = ar.all_gather(own)
        scores = own @ ar.ops.transpose(everyones)  # (batch, global_batch)
        loss = ar.ops.sum(ar.ops.exp(scores), axis=1)
        optimizer.minimize(loss, [w])
        return loss

    alone = ar.Variable(np.eye(3) + 0.1, name="alone")

    @ar.function
    def reference(x: Any) -> Any:
        own = ar.ops.tanh(x @ alone)
        loss = ar.ops.sum(ar.ops.exp(own @ ar.ops.transpose(own)), axis=1)
        return ar.gradients(ar.ops.sum(loss) / len(X), [alone])[0]

    _run(strategy, step, X)
    expected = alone.numpy() - 0.5 * reference(X).numpy()
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("rows", [7, 2])
def test_second_gradients_of_gathered_rows_are_those_of_the_global_batch(
    strategy: ar.Strategy, rows: int
) -> None:
    def slope(x: Any) -> Any:
        scores = ar.ops.tanh(x @ ar.ops.transpose(ar.all_gather(x)))
        return ar.gradients(ar.ops.sum(scores), [x])[0]

    def step(x: Any) -> Any:
        return ar.gradients(ar.ops.sum(ar.ops.square(slope(x))), [x])[0]

    wanted = ar.function(step)(X[:rows])
    found = strategy.gather(_run(strategy, step, X[:rows]))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_variable_may_be_assigned_what_all_replicas_share(strategy: ar.Strategy) -> None:
    with strategy.scope():
        total = ar.Variable(np.zeros(3), name="total")

    def step(x: Any) -> None:
        total.assign(total + ar.all_reduce(ar.ops.sum(x, axis=0)))

    for rows in (7, 2):
        _run(strategy, step, X[:rows])
    np.testing.assert_allclose(total.numpy(), X.sum(axis=0) + X[:2].sum(axis=0))


def test_replicas_are_numbered(strategy: ar.Strategy) -> None:
    ids = _run(strategy, lambda x: ar.replica_id() + 0 * ar.ops.size(x), X)
    assert [int(each) for each in ids.values] == list(range(strategy.num_replicas_in_sync))
    assert int(ar.replica_id()) == 0


def test_what_cannot_be_combined_is_refused() -> None:
    ar.config.set_logical_devices("CPU", 4)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(ShapeError, match="replicas have rows of their own"):
        _run(strategy, lambda x: ar.all_reduce(x), X)
    with pytest.raises(UsageError, match="divide a sum of values by a sum of counts"):
        _run(strategy, lambda x: ar.all_reduce(ar.ops.sum(x), op="mean"), X)
    with pytest.raises(UsageError, match="did you mean 'sum'"):
        _run(strategy, lambda x: ar.all_reduce(ar.ops.sum(x), op="summ"), X)
    with pytest.raises(ShapeError, match="a scalar has none"):
        _run(strategy, lambda x: ar.all_gather(ar.ops.sum(x)), X)
    with pytest.raises(UnsupportedError, match="'all_reduce' has no gradient"):
        _run(
            strategy,
            lambda x: ar.gradients(ar.all_reduce(ar.ops.sum(x), op="max"), [x])[0],
            X,
        )
    with strategy.scope(), pytest.raises(UsageError, match=r"call it through strategy.run"):
        ar.function(lambda x: ar.all_reduce(ar.ops.sum(x)))(X)


def test_a_result_can_be_the_first_argument_of_another_step(strategy: ar.Strategy) -> None:
    (batch,) = strategy.distribute_dataset([(X,)])
    doubled, both = strategy.run(lambda x: (x * 2, ar.ops.concatenate([x, x])), args=batch)
    assert doubled.rows_per_replica == batch[0].rows_per_replica
    assert both.rows_per_replica == tuple(2 * rows for rows in doubled.rows_per_replica)
    assert both.offsets == tuple(2 * offset for offset in doubled.offsets)
    gathered = strategy.run(lambda y, x: ar.all_gather(y), args=(doubled, *batch))
    for value in gathered.values:
        np.testing.assert_array_equal(value, 2 * X)


def test_all_arguments_are_asked_for_everyones_rows() -> None:
    by_hand = ar.PerReplica((X[:2], X[2:]))
    shared = ar.PerReplica((X[:2], X[2:]), offsets=(3, 5), rows_per_replica=(3, 2, 5))
    found = take_apart(((by_hand, shared), {}), 2)
    assert (found.rows_per_replica, found.offsets) == ((3, 2, 5), (3, 5))


def test_a_collective_waits_for_the_one_that_it_reads(strategy: ar.Strategy) -> None:
    step = ar.function(lambda x: ar.all_reduce(ar.all_reduce(ar.ops.sum(x))))
    for number in range(1, 20):
        (batch,) = strategy.distribute_dataset([(np.full(8, float(number)),)])
        found = strategy.run(step, args=batch)
        wanted = 8 * number * strategy.num_replicas_in_sync
        assert [float(value) for value in found.values] == [wanted] * len(found.values)


def test_rows_of_all_replicas_are_no_share_of_a_batch(strategy: ar.Strategy) -> None:
    (batch,) = strategy.distribute_dataset([(X,)])
    gathered = strategy.run(lambda x: ar.all_gather(x) + 0 * ar.replica_id(), args=batch)
    if strategy.num_replicas_in_sync > 1:
        assert not gathered.is_batch
    again = strategy.run(lambda y, x: ar.ops.size(y, 0), args=(gathered, *batch))
    assert [int(value) for value in again.values] == [len(X)] * strategy.num_replicas_in_sync


SCORES: dict[str, Any] = {
    "a new axis": lambda scores: ar.ops.expand_dims(scores, 0)[0],
    "None": lambda scores: scores[:, None] * 2,
    "kept axes": lambda scores: ar.ops.max(scores, axis=1, keepdims=True),
    "squeezed": lambda scores: ar.ops.squeeze(scores[..., None], -1) - 1.0,
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_all_rows_get_and_lose_axes(name: str) -> None:
    ar.config.set_logical_devices("CPU", 4)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x: Any) -> Any:
        scores = SCORES[name](x @ ar.ops.transpose(ar.all_gather(x)))
        return ar.ops.sum(scores), *ar.gradients(ar.ops.sum(scores), [x])

    value, slope = _run(strategy, step, X)
    (alone,) = ar.MirroredStrategy(["CPU:0"]).distribute_dataset([(X,)])
    wanted, wanted_slope = ar.MirroredStrategy(["CPU:0"]).run(step, args=alone)
    assert sum(value.values) == pytest.approx(wanted.values[0])
    np.testing.assert_allclose(strategy.gather(slope), wanted_slope.values[0])


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda x: ar.ops.reshape(x @ ar.ops.transpose(ar.all_gather(x)), -1), "more than one nam"),
        (lambda x: ar.ops.flatten((x @ ar.ops.transpose(ar.all_gather(x)))[None]), "more than one"),
        (lambda x: ar.all_gather(ar.all_gather(x)), "these are all replicas' rows already"),
    ],
)
def test_what_all_rows_cannot_do_is_told_with_the_users_line(step: Any, said: str) -> None:
    ar.config.set_logical_devices("CPU", 4)
    with pytest.raises(ShapeError, match=rf"test_collectives.py:\d+: .*{said}"):
        _run(ar.MirroredStrategy(["CPU:0", "CPU:1"]), step, X)


def test_a_step_that_gathers_rows_has_to_know_how_many_there_are() -> None:
    ar.config.set_logical_devices("CPU", 4)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    step = ar.function(lambda x: ar.all_gather(x))
    (batch,) = strategy.distribute_dataset([X])
    strategy.run(step, args=(batch,))
    compiled = strategy.latest(step)
    assert compiled is not None
    with pytest.raises(UsageError, match="how many there are is not known; make the batches with"):
        compiled.executors[0].run([X], StepInfo(len(X), 0, 2, rows_per_replica=None), batch=True)
