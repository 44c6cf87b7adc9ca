"""Losses and metrics: values, shapes, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import nn
from allreduce.errors import ShapeError, UsageError
from allreduce.graph import function
from allreduce.nn import losses, metrics
from allreduce.nn.models import registry

LOGITS = np.random.default_rng(3).normal(size=(5, 4)) * 3
SHARES = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
LABELS = np.array([0, 3, 1, 1, 2])
ONE_HOT = np.eye(4)[LABELS]
WANTED = -np.log(SHARES[np.arange(5), LABELS])


untyped_losses: Any = losses
untyped_metrics: Any = metrics


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: untyped_losses.SparseCategoricalCrossentropy(reduction="none"),
            "SparseCategoricalCrossentropy takes no reduction=: it gives one value per sample",
        ),
        (lambda: untyped_losses.Huber(axis=0), "Huber takes no axis=: classes are on the last"),
        (lambda: untyped_losses.Huber(delte=2.0), "unknown argument 'delte'.*did you mean 'delta'"),
        (lambda: untyped_metrics.AUC(dtype="float32"), "AUC takes no dtype=: states are summed"),
        (lambda: untyped_metrics.Precision(top_k=3), "Precision takes no top_k=: TopKCategorical"),
        (lambda: untyped_metrics.Recall(class_id=1), "Recall takes no class_id=: pass a function"),
        (lambda: untyped_metrics.AUC(num_treshholds=3), "did you mean 'num_thresholds'"),
        (lambda: metrics.AUC(num_thresholds=1), "'auc': num_thresholds is an integer from 2, not"),
        (lambda: metrics.ConfusionMatrix(True), "num_classes is an integer from 2, not True"),
        (lambda: metrics.TopKCategoricalAccuracy(0), "k is an integer from 1, not 0"),
    ],
)
def test_arguments_that_do_not_exist_here_are_explained(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_a_reduction_is_never_taken_as_a_name() -> None:
    with pytest.raises(UsageError, match="takes name= by name, not by position"):
        untyped_losses.MeanSquaredError("sum")
    assert losses.MeanSquaredError(name="squares").name == "squares"
    assert losses.Huber(2.0).options == {"delta": 2.0}
    assert metrics.TopKCategoricalAccuracy(np.int64(3)).k == 3  # type: ignore[arg-type]


def test_metrics_are_objects_with_names_too(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((4,)), nn.Activation("softmax")])
    own = [metrics.SparseCategoricalAccuracy("hits"), metrics.Metric(losses.mse, "error")]
    model.compile("sgd", "sparse_categorical_crossentropy", [metrics.Accuracy(), own[0]])
    found = model.evaluate(LOGITS, LABELS, verbose=0, return_dict=True)
    wanted = np.mean(LOGITS.argmax(axis=1) == LABELS)
    assert (found["accuracy"], found["hits"]) == (pytest.approx(wanted), pytest.approx(wanted))
    model.compile("sgd", "mse", [metrics.CategoricalAccuracy(), metrics.Accuracy(), own[1]])
    model.save(tmp_path / "model")
    for each in (model, nn.load_model(tmp_path / "model")):
        found = each.evaluate(LOGITS, ONE_HOT, verbose=0, return_dict=True)
        assert list(found) == ["loss", "categorical_accuracy", "accuracy", "error"]
        assert (found["accuracy"], found["error"]) == (pytest.approx(wanted), found["loss"])


@pytest.mark.parametrize(
    ("loss", "truth"),
    [
        (losses.categorical_crossentropy, ONE_HOT),
        (losses.sparse_categorical_crossentropy, LABELS),
        (losses.sparse_categorical_crossentropy, LABELS[:, None]),
        (losses.sparse_categorical_crossentropy, LABELS.astype(np.float32)),
    ],
)
def test_cross_entropies_of_shares_logits_and_folded_softmax_agree(loss: Any, truth: Any) -> None:
    folded = function(lambda z: loss(truth, nn.activations.get("softmax")(z)))
    for got in (
        loss(truth, SHARES),
        loss(truth, LOGITS, from_logits=True),
        folded(LOGITS),
    ):
        assert got.shape == (5,)
        np.testing.assert_allclose(got.numpy(), WANTED, rtol=1e-6)


def test_a_folded_softmax_stays_finite_where_shares_underflow() -> None:
    logits = np.array([[0.0, 800.0, 0.0]])
    folded = function(
        lambda z: losses.sparse_categorical_crossentropy([0], nn.activations.get("softmax")(z))
    )
    assert folded(logits).numpy().tolist() == [800.0]
    shares = np.array([[0.0, 1.0, 0.0]])
    clipped = losses.sparse_categorical_crossentropy([0], shares).numpy()
    np.testing.assert_allclose(clipped, -np.log(1e-7))  # as Keras clips


def test_mean_squared_error_gives_one_value_per_sample() -> None:
    truth, prediction = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    got = losses.mse(truth, prediction).numpy()
    np.testing.assert_allclose(got, ((truth - 1) ** 2).mean(axis=1))


def test_class_and_function_are_the_same_loss() -> None:
    from_logits = losses.SparseCategoricalCrossentropy(from_logits=True)
    np.testing.assert_allclose(from_logits(LABELS, LOGITS).numpy(), WANTED, rtol=1e-6)
    assert losses.get("SparseCategoricalCrossentropy") is losses.sparse_categorical_crossentropy
    assert losses.get("mse") is losses.mean_squared_error
    described = losses.serialize(from_logits)
    again = losses.deserialize(described, {})
    np.testing.assert_allclose(again(LABELS, LOGITS).numpy(), WANTED, rtol=1e-6)


def test_accuracies() -> None:
    wanted = (LOGITS.argmax(axis=1) == LABELS).astype(np.float32)
    assert 0 < wanted.sum() < 5
    for metric, truth in (
        (metrics.accuracy, LABELS),
        (metrics.accuracy, ONE_HOT),
        (metrics.accuracy, LABELS[:, None]),
        (metrics.sparse_categorical_accuracy, LABELS),
        (metrics.categorical_accuracy, ONE_HOT),
    ):
        assert np.array_equal(metric(truth, SHARES).numpy(), wanted)


def test_accuracy_is_resolved_by_the_loss() -> None:
    def resolved(loss: Any) -> Any:
        return metrics.get("accuracy", loss)[1]

    assert resolved(losses.categorical_crossentropy) is metrics.categorical_accuracy
    sparse = losses.SparseCategoricalCrossentropy(from_logits=True)
    assert resolved(sparse) is metrics.sparse_categorical_accuracy
    assert resolved(losses.mse) is metrics.accuracy


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: losses.mse(np.ones(4), np.ones((4, 1))),
            r"\(4,\) and y_pred \(4, 1\).*give y as y\[:, None\]",
        ),
        (
            lambda: losses.mse(np.ones((4, 1)), np.ones(4)),
            r"\(4, 1\) and y_pred \(4,\).*give y as y\[:, 0\]",
        ),
        (
            lambda: losses.categorical_crossentropy(LABELS, SHARES),
            "use sparse_categorical_crossentropy",
        ),
        (
            lambda: losses.sparse_categorical_crossentropy(ONE_HOT, SHARES),
            r"\(5, 4\) and y_pred \(5, 4\).*use the categorical one",
        ),
        (lambda: metrics.accuracy(np.ones(4), np.ones((4, 1))), "no choice among classes"),
        (
            lambda: metrics.sparse_top_k_categorical_accuracy(LABELS, SHARES),
            r"the 5 likeliest classes, but y_pred has shape \(5, 4\); give its class a smaller k",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_both_and_the_remedy(
    call: Any, message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.get("sparse_categorical_crosentropy"), "did you mean 'sparse_categ"),
        (lambda: losses.get(losses.MeanSquaredError), r"make one with MeanSquaredError\(\)"),
        (lambda: losses.get(3), "a name or a function"),
        (lambda: metrics.get("acuracy"), "unknown metric 'acuracy'.*did you mean 'accuracy'"),
        (lambda: nn.activations.get("rellu"), "unknown activation.*did you mean 'relu'"),
        (lambda: nn.initializers.get("he"), "unknown initializer"),
        (lambda: registry.layer_class("Dens", {}), "unknown layer.*'Dense'"),
    ],
)
def test_unknown_names_say_which_exist(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("from_logits", [False, True])
def test_labels_between_two_classes_are_refused(from_logits: bool) -> None:
    scores = np.full((2, 3), 1 / 3, np.float32)
    loss = nn.losses.SparseCategoricalCrossentropy(from_logits)
    whole, between = np.array([0.0, 2.0]), np.array([0.7, 2.0])
    np.testing.assert_allclose(loss(whole, scores).numpy(), np.log(3), rtol=1e-6)
    with pytest.raises(UsageError, match="label -1 in row 0"):  # no class, so that kernels see it
        loss(between, scores)
    hits = nn.metrics.sparse_categorical_accuracy(np.array([0.0, 0.7]), scores).numpy()
    assert hits.tolist() == [1, 0]
