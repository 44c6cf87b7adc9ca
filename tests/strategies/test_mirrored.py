"""Strategies over the logical devices of one process: steps, reductions, gathers, ownership."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import ClosedError, DeviceError, NumericsError, ShapeError, UsageError
from allreduce.events import logger

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


@pytest.fixture
def strategy() -> Iterator[ar.MirroredStrategy]:
    strategy = ar.MirroredStrategy(DEVICES)
    yield strategy
    strategy.close()


def _rows(count: int, width: int = 2) -> np.ndarray:
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def test_a_batch_is_cut_into_contiguous_parts(strategy: ar.MirroredStrategy) -> None:
    batches = list(strategy.distribute_dataset([(_rows(7), np.arange(7)), (_rows(2), np.ones(2))]))
    images, labels = batches[0]
    assert images.weights == labels.weights == (3, 2, 2)
    assert images.offsets == (0, 3, 5)
    np.testing.assert_array_equal(np.concatenate(strategy.local_results(images)), _rows(7))
    assert batches[1][0].weights == (1, 1, 0)


def test_every_replica_runs_the_step_on_its_part(strategy: ar.MirroredStrategy) -> None:
    (batch,) = strategy.distribute_dataset([_rows(7)])
    doubled = strategy.run(lambda x: x * 2, args=(batch,))
    np.testing.assert_array_equal(strategy.gather(doubled, axis=0), _rows(7) * 2)
    # An argument that is not PerReplica goes to all of them unchanged.
    moved = strategy.run(lambda x, y: x + y, args=(batch, np.float32(1)))
    np.testing.assert_array_equal(strategy.gather(moved, axis=0), _rows(7) + 1)


@pytest.mark.parametrize("rows", [7, 3, 2, 1])
def test_means_are_exact_with_uneven_and_empty_parts(
    strategy: ar.MirroredStrategy, rows: int
) -> None:
    (batch,) = strategy.distribute_dataset([_rows(rows, 1)])
    per_sample = strategy.run(lambda x: ar.ops.sum(x * 3, axis=1), args=(batch,))
    expected = (_rows(rows, 1) * 3).mean()
    assert strategy.reduce("mean", per_sample, axis=0) == pytest.approx(expected)
    assert strategy.reduce("sum", per_sample, axis=0) == pytest.approx(expected * rows)
    scalar = strategy.run(lambda x: ar.ops.mean(x * 3), args=(batch,))
    assert strategy.reduce("mean", scalar) == pytest.approx(expected), "weighted by rows"


def test_reduce_over_replicas_only_keeps_the_shape(strategy: ar.MirroredStrategy) -> None:
    value = ar.PerReplica(tuple(np.full((2, 2), i + 1.0) for i in range(3)), (1, 1, 1))
    np.testing.assert_array_equal(strategy.reduce("sum", value), np.full((2, 2), 6.0))
    np.testing.assert_array_equal(strategy.reduce("mean", value), np.full((2, 2), 2.0))
    assert strategy.reduce("sum", 2) == 6


def test_a_step_changes_all_replicas_by_the_global_mean(strategy: ar.MirroredStrategy) -> None:
    with strategy.scope():
        weight = ar.Variable(np.ones((2, 1), np.float32), name="weight")
        optimizer = ar.optim.SGD(0.1)

    @ar.function
    def step(x: ar.Tensor) -> ar.Tensor:
        loss = ar.ops.sum(ar.ops.square(x @ weight), axis=1)
        optimizer.minimize(loss, [weight])
        return loss

    data = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
    expected = weight.numpy()
    for start, stop in ((0, 8), (0, 5), (0, 1)):  # the last leaves two replicas without samples
        part = data[start:stop]
        expected = expected - 0.1 * 2 * part.T @ (part @ expected) / len(part)
        (batch,) = strategy.distribute_dataset([part])
        strategy.run(step, args=(batch,))
        for copy in weight.storage:
            np.testing.assert_array_equal(copy, weight.storage[0])
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5)
    assert optimizer.iterations == 3


def test_dropout_depends_on_the_sample_and_not_on_who_has_it() -> None:
    masks = []
    for names in (DEVICES[:1], DEVICES):
        ar.set_seed(3)
        strategy = ar.MirroredStrategy(names)
        (batch,) = strategy.distribute_dataset([np.ones((9, 50), np.float32)])
        dropped = strategy.run(lambda x: ar.ops.dropout(x, 0.5), args=(batch,))
        masks.append(strategy.gather(dropped))
        strategy.close()
    np.testing.assert_array_equal(masks[0], masks[1])
    assert 0.4 < (masks[0] == 0).mean() < 0.6


def test_an_error_in_one_replica_ends_the_step_with_that_error(
    strategy: ar.MirroredStrategy,
) -> None:
    with strategy.scope():
        weight = ar.Variable(np.ones((2, 3), np.float32), name="weight")
        optimizer = ar.optim.SGD(0.1)

    @ar.function
    def step(x: ar.Tensor, labels: ar.Tensor) -> None:
        loss = ar.nn.losses.sparse_categorical_crossentropy(labels, x @ weight, from_logits=True)
        optimizer.minimize(loss, [weight])

    (batch,) = strategy.distribute_dataset([(_rows(6), np.asarray([0, 1, 2, 0, 1, 9]))])
    with pytest.raises(UsageError, match="9"):
        strategy.run(step, args=batch)


def test_a_variable_of_another_scope_is_refused(strategy: ar.MirroredStrategy) -> None:
    outside = ar.Variable(np.ones(2, np.float32), name="outside")
    (batch,) = strategy.distribute_dataset([_rows(3)])
    with pytest.raises(UsageError, match=r"'outside'.*strategy\.scope"):
        strategy.run(lambda x: x * outside, args=(batch,))


def test_a_step_that_changes_replicas_is_not_called_directly(
    strategy: ar.MirroredStrategy,
) -> None:
    with strategy.scope():
        weight = ar.Variable(np.ones(2, np.float32), name="weight")
        optimizer = ar.optim.SGD(0.1)

        @ar.function
        def step(x: ar.Tensor) -> None:
            optimizer.minimize(ar.ops.sum(x * weight, axis=1), [weight])

        @ar.function
        def look(x: ar.Tensor) -> ar.Tensor:
            return x * weight

        with pytest.raises(UsageError, match=r"strategy\.run"):
            step(_rows(3))
        np.testing.assert_array_equal(look(_rows(3)).numpy(), _rows(3))


@pytest.mark.parametrize(
    ("devices", "error", "match"),
    [
        (["CPU:9"], DeviceError, "CPU:9"),
        (["TPU:0"], DeviceError, "TPU"),
        (["CPU:0", "CPU:0"], UsageError, "its own device"),
        ([], UsageError, "none"),
        ("CPU:0", UsageError, "a list of names"),
        (3, UsageError, "a list of names, such as .*, not 3"),
    ],
)
def test_wrong_devices_are_named(devices: list[str], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ar.MirroredStrategy(devices)


def test_wrong_arguments_are_named(strategy: ar.MirroredStrategy) -> None:
    for name in ("men", "avg"):
        with pytest.raises(UsageError, match="did you mean 'mean'"):
            strategy.reduce(name, 1)
        with pytest.raises(UsageError, match="did you mean 'mean'"):
            strategy.communicator.all_reduce(np.ones(3), op=name)
    one = ar.PerReplica((_rows(2),))
    with pytest.raises(UsageError, match="has 1 values, but this process has 3"):
        strategy.run(lambda x: x, args=(one,))
    three = ar.PerReplica((_rows(2), _rows(2), _rows(2)))
    fewer = ar.PerReplica((_rows(2), _rows(1), _rows(2)))
    with pytest.raises(ShapeError, match=r"\(2, 2, 2\) and \(2, 1, 2\)"):
        strategy.run(lambda x, y: x, args=(three, fewer))
    mixed = ar.PerReplica((_rows(2), _rows(2, 3), _rows(2)))
    with pytest.raises(ShapeError, match="more than their rows"):
        strategy.run(lambda x: x, args=(mixed,))
    with pytest.raises(UsageError, match="mean of nothing"):
        strategy.reduce("mean", ar.PerReplica((np.zeros(0),) * 3), axis=0)


def test_a_nan_loss_is_named(strategy: ar.MirroredStrategy) -> None:
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    x = _rows(6)
    x[4, 1] = np.nan
    with pytest.raises(NumericsError, match="step"):
        model.fit(x, np.zeros((6, 1), np.float32), epochs=1, verbose=0)


def test_one_replica_is_not_many(caplog: pytest.LogCaptureFixture) -> None:
    assert repr(ar.MirroredStrategy(["CPU:0"])) == "MirroredStrategy with 1 replica"
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "allreduce"):
            ar.MultiWorkerMirroredStrategy()
    finally:
        logger.removeHandler(caplog.handler)
    assert " on 1 rank; " in caplog.text


@pytest.mark.parametrize("devices", [DEVICES[:1], DEVICES])
def test_a_closed_strategy_runs_no_steps_and_leaves_its_variables(devices: list[str]) -> None:
    strategy = ar.MirroredStrategy(devices)
    with strategy.scope():
        w = ar.Variable(np.ones(2, np.float32), name="w")

    def step(x: ar.Tensor) -> None:
        w.assign(w * 2)

    strategy.run(step, args=(np.ones(1),))
    strategy.close()
    strategy.close()
    for fn, eagerly in ((step, False), (step, True), (lambda x: x + w, False)):
        with pytest.raises(
            ClosedError, match=r"test_mirrored.py:\d+: .* as it was closed\. Its var"
        ):
            strategy.run(fn, args=(np.ones(1),), eagerly=eagerly)
    np.testing.assert_array_equal(w.numpy(), [2, 2])
    w.assign(w + 1)
    np.testing.assert_array_equal(ar.ops.sum(w), 6)
