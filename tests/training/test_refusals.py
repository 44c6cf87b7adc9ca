"""What `fit`, `evaluate` and `predict` refuse on one process, and in which words."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

from allreduce import nn
from allreduce.errors import NumericsError, ShapeError, UsageError
from allreduce.events import logger
from tests.nn.common import blobs, classifier


def fitted(x: Any = None, y: Any = None, **options: Any) -> Any:
    own_x, own_y = blobs(12)
    x = own_x if x is None else x
    return classifier().fit(x, own_y if y is None else y, verbose=0, **options)


def _labels(row: int, label: float) -> np.ndarray:
    labels = np.zeros(12, np.array(label).dtype)
    labels[row] = label
    return labels


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: fitted(y=np.zeros(5, int)), ShapeError, r"\(12, 6\) and \(5,\): 12 rows and 5"),
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
        (lambda: fitted(validation_data=(1, 2, 3)), UsageError, r"a pair \(x, y\), not 3 values"),
        (lambda: classifier().compile("sgd", "mse_loss"), UsageError, "did you mean 'mse'"),
        (
            lambda: fitted(validation_data=(np.ones((3, 6)), np.zeros(2, int))),
            ShapeError,
            "validation x and validation y",
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
    last: str | None, loss: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential([nn.Dense(4), nn.Sequential([nn.Dense(3, activation=last)])])
    model.compile("sgd", loss)
    x, y = blobs(12)
    targets = np.eye(3)[y] if loss == "mse" else y
    logger.addHandler(caplog.handler)
    try:
        for _ in range(2):
            model.fit(x, targets, verbose=0)
    finally:
        logger.removeHandler(caplog.handler)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == bool(said)
    assert re.search(said, "".join(found))
    x[3] = np.nan
    remedy = said or "infinity in x and y, and in the weights"
    with pytest.raises(NumericsError, match=remedy):
        model.fit(x, targets, verbose=0)
