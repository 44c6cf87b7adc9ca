"""Losses beside their formulas in NumPy, their gradients, options and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce import nn
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core import pytree
from allreduce.nn import losses

RNG = np.random.default_rng(5)
TRUTH, VALUES = RNG.normal(size=(7, 3)), RNG.normal(size=(7, 3))
LABELS = RNG.integers(0, 2, (7, 3)).astype(np.float64)
SHARES = RNG.uniform(0.05, 0.95, (7, 3))
ROWS = RNG.dirichlet(np.ones(3), 7)
ONE_HOT = np.eye(3)[RNG.integers(0, 3, 7)]


def _sigmoid(z: np.ndarray) -> Any:
    return 1 / (1 + np.exp(-z))


def _binary(y: np.ndarray, p: np.ndarray) -> Any:
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


def _huber(d: np.ndarray, delta: float) -> Any:
    return np.where(np.abs(d) <= delta, d**2 / 2, delta * (np.abs(d) - delta / 2))


def _softmax(z: np.ndarray) -> Any:
    return np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)


def _focal(y: np.ndarray, p: np.ndarray) -> Any:
    return -(y * 0.25 * (1 - p) ** 2 * np.log(p)).sum(axis=1)


_OF_TRUTH = LABELS * SHARES + (1 - LABELS) * (1 - SHARES)
_SMOOTH = ONE_HOT * 0.9 + 0.1 / 3
CASES: list[tuple[Any, Any, Any, Any]] = [
    (losses.MeanAbsoluteError(), TRUTH, VALUES, np.abs(TRUTH - VALUES).mean(axis=1)),
    (losses.Huber(), TRUTH, VALUES, _huber(TRUTH - VALUES, 1.0).mean(axis=1)),
    (losses.Huber(0.3), TRUTH, VALUES, _huber(TRUTH - VALUES, 0.3).mean(axis=1)),
    (losses.BinaryCrossentropy(), LABELS, SHARES, _binary(LABELS, SHARES).mean(axis=1)),
    (
        losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.2),
        LABELS,
        VALUES,
        _binary(LABELS * 0.8 + 0.1, _sigmoid(VALUES)).mean(axis=1),
    ),
    (
        losses.BinaryFocalCrossentropy(gamma=1.5),
        LABELS,
        SHARES,
        ((1 - _OF_TRUTH) ** 1.5 * _binary(LABELS, SHARES)).mean(axis=1),
    ),
    (
        losses.BinaryFocalCrossentropy(apply_class_balancing=True),
        LABELS,
        SHARES,
        (np.where(LABELS, 0.25, 0.75) * (1 - _OF_TRUTH) ** 2 * _binary(LABELS, SHARES)).mean(1),
    ),
    (losses.CategoricalFocalCrossentropy(), ONE_HOT, ROWS, _focal(ONE_HOT, ROWS)),
    (
        losses.CategoricalFocalCrossentropy(from_logits=True),
        ONE_HOT,
        VALUES,
        _focal(ONE_HOT, _softmax(VALUES)),
    ),
    (losses.KLDivergence(), ROWS[::-1], ROWS, (ROWS[::-1] * np.log(ROWS[::-1] / ROWS)).sum(1)),
    (losses.Hinge(), LABELS, VALUES, np.maximum(1 - (2 * LABELS - 1) * VALUES, 0).mean(axis=1)),
    (
        losses.CosineSimilarity(),
        TRUTH,
        VALUES,
        -(TRUTH * VALUES).sum(1) / np.linalg.norm(TRUTH, axis=1) / np.linalg.norm(VALUES, axis=1),
    ),
    (
        losses.CategoricalCrossentropy(label_smoothing=0.1),
        ONE_HOT,
        ROWS,
        -(_SMOOTH * np.log(ROWS)).sum(axis=1),
    ),
    (
        losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        ONE_HOT,
        VALUES,
        -(_SMOOTH * np.log(_softmax(VALUES))).sum(axis=1),
    ),
]


@pytest.mark.parametrize(
    ("loss", "truth", "prediction", "wanted"), CASES, ids=lambda each: getattr(each, "name", "")
)
def test_losses_are_their_formulas_and_gradients(
    loss: losses.Loss, truth: np.ndarray, prediction: np.ndarray, wanted: np.ndarray
) -> None:
    np.testing.assert_allclose(loss(truth, prediction).numpy(), wanted, rtol=1e-6)
    again = losses.deserialize(losses.serialize(loss), {})
    np.testing.assert_array_equal(again(truth, prediction).numpy(), loss(truth, prediction).numpy())
    variable = ar.Variable(prediction, name="predictions")
    step = ar.function(lambda: ar.gradients(loss(truth, variable), [variable])[0])
    shift, found = 1e-6, np.asarray(step()) * len(prediction)  # of the sum, not of the mean
    numeric = np.empty_like(prediction)
    for place in np.ndindex(prediction.shape):
        moved = [prediction.copy(), prediction.copy()]
        moved[0][place] += shift
        moved[1][place] -= shift
        above, below = (float(loss(truth, each).numpy().sum()) for each in moved)
        numeric[place] = (above - below) / (2 * shift)
    np.testing.assert_allclose(found, numeric, rtol=1e-4, atol=1e-6)


def test_positions_to_ignore_count_nothing() -> None:
    labels = np.array([[0, 2, -1], [-1, -1, -1], [1, 1, 1]])
    shares = RNG.dirichlet(np.ones(3), (3, 3))
    loss = losses.SparseCategoricalCrossentropy(ignore_class=-1)
    logs = -np.log(shares)
    first = (logs[0, 0, 0] + logs[0, 1, 2]) / 2
    np.testing.assert_allclose(
        loss(labels, shares).numpy(), [first, 0, logs[2, :, 1].mean()], rtol=1e-6
    )


def test_every_loss_has_its_names() -> None:
    for function, row in losses.ROWS.items():
        for name in (function.__name__, *row.aliases):
            assert losses.get(name) is function
        assert losses.get(row.kind.__name__) is function
        assert getattr(losses, row.kind.__name__) is row.kind
        assert row.kind().function is function
    for wrong in ("mape", "msle"):  # other losses, not spellings of "mae" and "mse"
        with pytest.raises(UsageError) as caught:
            losses.get(wrong)
        assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.huber(TRUTH, VALUES, 0), "huber: delta is a finite number > 0, not 0"),
        (lambda: losses.Huber(np.inf), "loss 'huber_loss': delta is a finite number > 0, not inf"),
        (lambda: losses.BinaryCrossentropy(label_smoothing=2), "label_smoothing is .* from 0 to 1"),
        (lambda: losses.CategoricalCrossentropy(label_smoothing="a"), "label_smoothing is a num"),  # type: ignore[arg-type]
        (lambda: losses.BinaryFocalCrossentropy(gamma=-1), "gamma is a finite number >= 0, not -1"),
        (lambda: losses.BinaryFocalCrossentropy(alpha=1.5), "alpha is a number from 0 to 1, not 1"),
        (lambda: losses.CategoricalFocalCrossentropy([0.5, -1]), "alpha is a finite number >= 0"),
        (lambda: losses.CategoricalFocalCrossentropy(gamma="a"), "gamma is a finite number >= 0"),  # type: ignore[arg-type]
        (
            lambda: losses.SparseCategoricalCrossentropy(ignore_class=1.5),  # type: ignore[arg-type]
            "'sparse_categorical_crossentropy': ignore_class is an integer, not 1.5",
        ),
        (lambda: losses.Loss(losses.huber, gamma=2.0), r"takes no 'gamma'; it takes \['delta'\]"),
        (lambda: losses.BinaryCrossentropy(from_logits="yes"), "True or False"),  # type: ignore[arg-type]
    ],
)
def test_options_that_make_no_sense_are_refused(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def _stepping(model: Any) -> Any:
    """Make what runs a batch through the model's test step, and gives its results as arrays."""

    def run(*batch: Any) -> dict[str, np.ndarray]:
        arguments = pytree.map_leaves(lambda each: ar.PerReplica((each,)), batch)
        found = model.replicator.run(model.test_step, arguments)
        return {name: value.values[0] for name, value in found.items()}

    return run


def _two_outputs(**options: Any) -> Any:
    class Two(nn.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Dense(1), nn.Dense(1, activation="sigmoid")

        def call(self, x: Any) -> Any:
            return {"price": self.first(x), "cheap": self.second(x)}

    model = Two()
    model.compile("sgd", **options)
    return model


def test_several_outputs_have_losses_weights_and_metrics_of_their_own() -> None:
    model = _two_outputs(
        loss={"price": "mse", "cheap": "bce"},
        loss_weights={"cheap": 0.5},
        metrics={"price": ["mae"], "cheap": ["accuracy"]},
    )
    x, y = VALUES.astype("float32"), {"price": TRUTH[:, :1], "cheap": LABELS[:, :1]}
    step = _stepping(model)
    found = {name: float(np.mean(value)) for name, value in step(x, y).items()}
    assert list(found) == ["loss", "price_loss", "cheap_loss", "price_mae", "cheap_accuracy"]
    assert found["loss"] == pytest.approx(found["price_loss"] + 0.5 * found["cheap_loss"], rel=1e-6)
    with pytest.raises(UsageError, match="y is a dict of 'price', but the model's outputs are"):
        step(x, {"price": y["price"]})
    for options, message in (
        ({"loss": {"prise": "mse"}}, "loss names output 'prise'.*did you mean 'price'"),
        ({"loss": ["mse"]}, "1 entries, but the model has 2 outputs"),
        ({"loss": "mse", "metrics": {"x": ["mae"]}}, "metrics names output 'x'"),
        ({"loss": {}}, "no output has a loss"),
    ):
        with pytest.raises(UsageError, match=message):
            _stepping(_two_outputs(**options))(x, y)


def test_weights_multiply_each_samples_loss() -> None:
    model = nn.Sequential([nn.Input((3,)), nn.Activation("linear")])
    model.compile("sgd", "mse", weighted_metrics=["mae"], metrics=["mse"])
    weights = RNG.uniform(0, 3, 7)
    x, y = VALUES.astype("float32"), TRUTH.astype("float32")
    found = _stepping(model)(x, y, weights)
    errors = ((VALUES - TRUTH) ** 2).mean(axis=1)
    np.testing.assert_allclose(found["loss"], errors * weights, rtol=1e-5)
    np.testing.assert_allclose(found["mse"], errors, rtol=1e-5)
    wanted = (np.abs(VALUES - TRUTH).mean(axis=1) * weights).sum() / weights.sum()
    value = model.state_values["mae"](np.asarray(found["mae"]))
    assert value == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ShapeError, match=r"sample_weight.*one value of the loss per sample"):
        _stepping(model)(x, y, np.ones((7, 5)))


def test_a_list_of_class_weights_keeps_the_loss_in_float32() -> None:
    truth, p = np.eye(3, dtype=np.float32), np.full((3, 3), 1 / 3, np.float32)
    loss = losses.CategoricalFocalCrossentropy(alpha=[1.0, 2.0, 3.0], gamma=0.0)
    found = np.asarray(loss(truth, p))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.array([1, 2, 3]) * np.log(3), rtol=1e-5)
