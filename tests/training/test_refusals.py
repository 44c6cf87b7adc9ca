"""What `fit`, `evaluate` and `predict` refuse on one process, and in which words."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

from allreduce import nn, optim
from allreduce.errors import NumericsError, ShapeError, UsageError
from allreduce.events import logger
from allreduce.graph import function, ops, set_seed
from tests.nn.common import blobs, classifier


def fitted(x: Any = None, y: Any = None, **options: Any) -> Any:
    own_x, own_y = blobs(12)
    x = own_x if x is None else x
    return classifier().fit(x, own_y if y is None else y, verbose=0, **options)


class Messages(logging.Handler):
    """Lists the warnings that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@pytest.fixture
def warned() -> Iterator[list[str]]:
    handler = Messages()
    logger.addHandler(handler)
    yield handler.found
    logger.removeHandler(handler)


def _labels(row: int, label: float) -> np.ndarray:
    labels = np.zeros(12, np.array(label).dtype)
    labels[row] = label
    return labels


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: fitted(y=np.zeros(5, int)), ShapeError, "x and y need .* have 12 and 5: their"),
        (lambda: fitted(x=np.empty((0, 6))), UsageError, r"x is empty: its shape is \(0, 6\)"),
        (lambda: fitted(x=[[1.0], [1.0, 2.0]]), UsageError, "x cannot be made into one array"),
        (lambda: fitted(x=np.array([None, {}])), UsageError, "x has dtype object"),
        (lambda: fitted(x=np.array(["a", "b"])), UsageError, "x has dtype <U1"),
        (lambda: fitted(x=3.0), ShapeError, "x is the scalar 3.0"),
        (lambda: fitted(y=np.full(12, 3)), UsageError, "label 3 in row 0"),
        (lambda: fitted(y=np.full(12, -1)), UsageError, "label -1"),
        (
            lambda: fitted(y=_labels(7, 3)),
            UsageError,
            "label 3 in row 7 of y is no class: .* 3 out",
        ),
        (lambda: fitted(y=_labels(9, 0.7)), UsageError, "label 0.7 in row 9 of y is no class"),
        (lambda: fitted(y=_labels(2, np.nan)), UsageError, "label nan in row 2 of y"),
        (
            lambda: fitted(validation_data=(np.ones((12, 6)), _labels(5, 4)[:, None])),
            UsageError,
            "label 4 in row 5 of validation y",
        ),
        (lambda: classifier().evaluate(blobs(12)[0], _labels(7, 3)), UsageError, "row 7 of y"),
        (lambda: fitted(shuffle="no"), UsageError, "shuffle is True or False, not 'no'"),
        (lambda: classifier().fit(*blobs(), verbose=np.ones(3)), UsageError, "verbose is"),
        (
            lambda: fitted(y=np.zeros((12, 3))),
            ShapeError,
            r"\(x has shape \(12, 6\) and y \(12, 3\)\)",
        ),
        (lambda: fitted(batch_size=0), UsageError, "batch_size is the global batch"),
        (lambda: fitted(epochs=-1), UsageError, "epochs is an integer from 0"),
        (lambda: fitted(epochs=1.5), UsageError, "epochs is an integer from 0"),
        (lambda: fitted(data="shards"), UsageError, 'data is "same"'),
        (lambda: classifier().fit(*blobs(), verbose=3), UsageError, "verbose is"),
        (lambda: classifier().fit(*blobs(), verbose="Auto"), UsageError, "did you mean 'auto'"),
        (lambda: classifier().fit(*blobs(), data="shard"), UsageError, "did you mean 'sharded'"),
        (
            lambda: fitted(validation_data=np.ones(3)),
            UsageError,
            r"y\), not one array of shape \(3,\)",
        ),
        (lambda: fitted(validation_data=(1, 2, 3, 4)), UsageError, r"\(x, y\), not 4 values"),
        (lambda: classifier().compile("sgd", "mse_loss"), UsageError, "did you mean 'mse'"),
        (
            lambda: fitted(validation_data=(np.ones((3, 6)), np.zeros(2, int))),
            ShapeError,
            "validation x and y need one row",
        ),
        (
            lambda: fitted(validation_data=(np.ones((3, 4)), np.zeros(3, int))),
            ShapeError,
            r"takes inputs of shape \(…, 6\), but got \(batch, 4\) \(validation x has shape",
        ),
        (lambda: classifier().predict(np.empty((0, 6))), UsageError, "x is empty"),
    ],
)
def test_bad_input_is_refused(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_features_have_to_fit_a_built_model() -> None:
    model = classifier()
    model.build((None, 6))
    with pytest.raises(ShapeError, match=r"\(…, 6\), but got \(batch, 5\) \(x has shape \(8, 5\)"):
        model.fit(np.ones((8, 5)), np.zeros(8, int))


def test_mse_never_broadcasts_targets() -> None:
    model = nn.Sequential([nn.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ShapeError, match=r"\(batch,\) and y_pred \(batch, 1\).*y\[:, None\]"):
        model.fit(np.ones((8, 5)), np.ones(8))


def squared(y_true: Any, y_pred: Any) -> Any:
    return ops.square(y_pred - y_true)


@pytest.mark.parametrize("compiled", [{"loss": squared}, {"metrics": [squared]}])
def test_a_function_of_ones_own_does_not_compare_all_pairs(compiled: dict[str, Any]) -> None:
    model = nn.Sequential([nn.Dense(1)])
    model.compile("sgd", **{"loss": lambda _, y_pred: ops.mean(y_pred, axis=1), **compiled})
    said = rf"{line_in(squared, 1)}: .* has shape \(batch, batch\): .* as by y\[:, None\]"
    for method in (model.fit, model.evaluate):
        with pytest.raises(ShapeError, match=said):
            method(np.ones((8, 5)), np.ones(8), verbose=0)


def test_a_model_made_outside_its_strategy_is_refused() -> None:
    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        inside = nn.Sequential()
    inside.compile("sgd", "mse")
    outside = nn.Dense(1)
    inside.add(outside)
    with pytest.raises(UsageError, match=r"outside of any strategy's scope.*in the scope of"):
        inside.fit(np.ones((8, 5)), np.ones((8, 1)))


def test_numpy_in_a_loss_is_told_with_the_users_line() -> None:
    model = nn.Sequential([nn.Dense(1)])
    model.compile("sgd", lambda y, p: np.median((y - p) ** 2))
    with pytest.raises(
        UsageError, match=r"test_refusals\.py:\d+: np\.median has no operator .* use ar\.ops"
    ):
        model.fit(np.ones((8, 5)), np.ones((8, 1)), verbose=0)


@pytest.mark.parametrize(
    ("last", "loss", "said"),
    [
        (None, "sparse_categorical_crossentropy", "last layer is linear, but the loss sparse_cat"),
        (
            "relu",
            "sparse_categorical_crossentropy",
            "is relu, .*SparseCategoricalCrossentropy\\(fr",
        ),
        ("softmax", "sparse_categorical_crossentropy", ""),
        ("sigmoid", "sparse_categorical_crossentropy", ""),
        (None, nn.losses.SparseCategoricalCrossentropy(from_logits=True), ""),
        (None, "mse", ""),
    ],
)
def test_outputs_that_are_no_probabilities_are_spoken_of_once(
    last: str | None, loss: Any, said: str, warned: list[str]
) -> None:
    set_seed(0)
    layers = [nn.Dense(4), nn.Sequential([nn.Dense(3, activation=last)])]
    model = nn.Sequential(layers, name="doubtful")  # with these initial values, whatever ran before
    model.compile("sgd", loss)
    x, y = blobs(12)
    targets = np.eye(3)[y] if loss == "mse" else y
    for _ in range(2):
        model.fit(x, targets, verbose=0)
    assert len(warned) == bool(said)
    assert re.search(said, "".join(warned))
    x[3] = np.nan
    remedy = said or "infinity in x and y, and in the weights"
    with pytest.raises(NumericsError, match=remedy):
        model.fit(x, targets, verbose=0)


def r2(y_true: Any, y_pred: Any) -> Any:
    return 1 - ops.sum(ops.square(y_pred - y_true)) / ops.sum(ops.square(y_true))


def line_in(fn: Any, number: int) -> str:
    """Say which line of the file the `number`th one of a function is."""
    return rf"test_refusals\.py:{inspect.getsourcelines(fn)[1] + number}\b"


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("kind", ["metrics", "weighted_metrics"])
def test_a_metric_that_gives_a_scalar_is_refused(replicas: int, eagerly: bool, kind: str) -> None:
    with MirroredStrategy([f"CPU:{index}" for index in range(replicas)]).scope():
        model = nn.Sequential([nn.Dense(1)])
        own: Any = {kind: [r2]}
        model.compile("sgd", "mse", **own, run_eagerly=eagerly)
    x, y = np.ones((8, 5), np.float32), np.ones((8, 1), np.float32)
    said = rf"{line_in(r2, 1)}: metric 'r2' is a scalar; .*per sample, \(batch,\)"
    for method in (model.fit, model.evaluate):
        with pytest.raises(ShapeError, match=said):
            method(x, y, verbose=0)
        with pytest.raises(ShapeError, match=said):
            method(x, y, sample_weight=np.ones(8), verbose=0)


def test_a_scalar_in_a_loop_of_ones_own_is_refused() -> None:
    metric = nn.metrics.Metric(r2)
    with pytest.raises(ShapeError, match=r"metric 'r2' is a scalar; .*per sample, \(batch,\)"):
        metric.update_state(np.ones(8), np.zeros(8))
    assert np.isnan(metric.result())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_scalar_of_a_step_of_ones_own_is_refused_unless_it_is_a_loss(replicas: int) -> None:
    class Trained(nn.Sequential):
        def train_step(self, data: Any) -> Any:
            found = super().train_step(data)
            return {**found, "r2": r2(data[1], self(data[0]))} if scalar else found

    class Tested(nn.Sequential):
        def test_step(self, data: Any) -> Any:
            found = super().test_step(data)
            return {**found, "r2": r2(data[1], self(data[0]))} if scalar else found

    x, y = np.ones((8, 5), np.float32), np.ones((8, 1), np.float32)
    for kind, step in ((Trained, "Trained.train_step"), (Tested, "Tested.test_step")):
        with MirroredStrategy([f"CPU:{index}" for index in range(replicas)]).scope():
            model = kind([nn.Dense(1)])
        for scalar in (True, False):
            model.compile(optim.SGD(1e-6), averaged)
            method = model.fit if kind is Trained else model.evaluate
            said = rf"{line_in(r2, 1)}: 'r2' of {step} is a scalar; give one value per sample"
            with pytest.raises(ShapeError, match=said) if scalar else nullcontext():
                method(x, y, verbose=0)


def summed(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.square(y_pred - y_true))


def summed_in_evaluate(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.square(y_pred - y_true))


def averaged(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_pred - y_true))


def test_a_loss_that_is_a_sum_is_warned_of_once(warned: list[str]) -> None:
    x, y = np.ones((8, 5), np.float32), np.ones((8, 1), np.float32)
    for replicas, loss in ((1, summed), (2, averaged), (2, summed), (3, summed)):
        with MirroredStrategy([f"CPU:{index}" for index in range(replicas)]).scope():
            model = nn.Sequential([nn.Dense(1)])
            model.compile(optim.SGD(1e-6), loss)
        model.fit(x, y, verbose=0, validation_data=(x, y))
    model.compile("sgd", summed_in_evaluate)
    model.evaluate(x, y, verbose=0)
    for message, fn, replicas in zip(warned, (summed, summed_in_evaluate), (2, 3), strict=True):
        assert re.search(rf"^\S*{line_in(fn, 1)}: the loss of each replica is a scalar", message)
        assert f"depend on the number of replicas (here {replicas}). Return one value" in message


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_step_of_ones_own_is_warned_of_a_reduced_loss(eagerly: bool, warned: list[str]) -> None:
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = nn.Sequential([nn.Input((2,)), nn.Dense(1)])
        optimizer = optim.SGD(1e-6)

    def minimize(loss: Any, **options: Any) -> None:
        optimizer.minimize(loss, model.trainable_variables, **options)

    steps = [
        lambda x: minimize(ops.sum(model(x))),
        lambda x: minimize(ops.mean(model(x), axis=0)),
        lambda x: minimize(ops.sqrt(ops.mean(ops.square(model(x))))),
        lambda x: minimize(ops.sum(model(x)) / 3, weight=3),
        lambda x: minimize(ops.mean(model(x))),
        lambda x: minimize(ops.mean(model(x)) / 2 + 0.1 * ops.sum(model.variables[0] * 1)),
        lambda x: minimize(ops.sum(model.variables[0] * 1)),
        lambda x: minimize(model(x)),
        lambda x: minimize(ops.mean(model(x), axis=1)),
    ]
    if eagerly:  # other lines, as each is warned of once
        steps[:3] = [
            lambda x: minimize(-ops.sum(model(x))),
            lambda x: minimize(-ops.mean(model(x), axis=0)),
            lambda x: minimize(ops.mean(x) * ops.mean(model(x))),
        ]
    for step in steps:
        (batch,) = strategy.distribute_dataset([np.ones((5, 2), np.float32)])
        for _ in range(2):
            strategy.run(function(step), args=(batch,), eagerly=eagerly)
    shapes = ("a scalar, which", "of shape (1,), which", "a scalar, which")
    for message, shape, step in zip(warned, shapes, steps, strict=False):
        assert re.search(rf"^\S*{line_in(step, 0)}: the loss of each replica is ", message)
        assert f"the loss of each replica is {shape} " in message
    assert len(warned) == 3
