"""Metrics with state: whoever has the samples, the values are those of NumPy on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allreduce.strategies import MirroredStrategy

import allreduce as ar
from allreduce import nn
from allreduce.errors import ShapeError, UsageError
from allreduce.nn import metrics
from tests.harness import run_ranks

ROWS, BATCH = 1003, 77
RNG = np.random.default_rng(11)
LABELS = RNG.integers(0, 2, (ROWS, 1)).astype(np.float32)
SHARES = np.clip(0.3 * LABELS + RNG.uniform(0, 0.7, (ROWS, 1)), 0, 1).astype(np.float32)
CLASSES = RNG.integers(0, 4, ROWS)
FOUR = RNG.dirichlet(np.ones(4), ROWS).astype(np.float32)


def _curve() -> tuple[np.ndarray, np.ndarray]:
    levels = np.linspace(0, 1, 200)
    levels[0], levels[-1] = -1, 2
    above = levels < SHARES
    return (above & (LABELS > 0)).sum(0), (above & (LABELS == 0)).sum(0)


def _area() -> float:
    hits, alarms = _curve()
    return float(-np.trapezoid(hits / LABELS.sum(), alarms / (ROWS - LABELS.sum())))


def _precision_and_recall() -> tuple[float, float]:
    chosen = SHARES > 0.5
    hits = float((chosen & (LABELS > 0)).sum())
    return hits / float(chosen.sum()), hits / float(LABELS.sum())


def _binary_wanted() -> dict[str, float]:
    precision, recall = _precision_and_recall()
    residual = float(((LABELS - SHARES) ** 2).sum(dtype=np.float64))
    spread = float(((LABELS - LABELS.mean(dtype=np.float64)) ** 2).sum(dtype=np.float64))
    return {
        "precision": precision,
        "recall": recall,
        "f1_score": 2 * precision * recall / (precision + recall),
        "auc": _area(),
        "r2_score": 1 - residual / spread,
        "binary_accuracy": float(((SHARES > 0.5) == (LABELS > 0)).mean()),
        "mean_absolute_error": float(np.abs(LABELS - SHARES).mean(dtype=np.float64)),
        "root_mean_squared_error": float(np.sqrt(residual / ROWS)),
    }


_PROGRAM = """
import json
import numpy as np
import allreduce as ar
from allreduce import nn
from tests.nn.metrics.test_metric_states import BATCH, CLASSES, FOUR, LABELS, SHARES, evaluated

strategy = ar.MultiWorkerMirroredStrategy()
found = evaluated(strategy)
if strategy.communicator is None or strategy.communicator.rank == 0:
    print(json.dumps(found))
"""


def evaluated(strategy: Any) -> dict[str, Any]:
    """Evaluate every metric on predictions that are their own inputs."""
    with strategy.scope():
        model = nn.Sequential([nn.Input((1,)), nn.Activation("linear")])
        binary = list(_binary_wanted())
        model.compile("sgd", "mse", metrics=[*binary, metrics.AUC(curve="PR", name="pr")])
        four = nn.Sequential([nn.Input((4,)), nn.Activation("linear")])
        four.compile(
            "sgd",
            "sparse_categorical_crossentropy",
            metrics=[
                "perplexity",
                metrics.ConfusionMatrix(4),
                metrics.SparseTopKCategoricalAccuracy(2, name="top2"),
            ],
        )
    found = model.evaluate(SHARES, LABELS, batch_size=BATCH, verbose=0, return_dict=True)
    more = four.evaluate(FOUR, CLASSES, batch_size=BATCH, verbose=0, return_dict=True)
    return {**more, **found, "confusion_matrix": more["confusion_matrix"].tolist()}


def _check(found: dict[str, Any]) -> None:
    for name, wanted in _binary_wanted().items():
        assert found[name] == pytest.approx(wanted, abs=1e-6), name
    chosen = FOUR.argmax(axis=1)
    table = np.zeros((4, 4), int)
    np.add.at(table, (CLASSES, chosen), 1)
    assert found["confusion_matrix"] == table.tolist()
    logs = np.log(FOUR.astype(np.float64)[np.arange(ROWS), CLASSES])
    assert found["perplexity"] == pytest.approx(np.exp(-logs.mean()), rel=1e-5)
    top = np.argsort(-FOUR, axis=1)[:, :2]
    assert found["top2"] == pytest.approx((top == CLASSES[:, None]).any(axis=1).mean(), abs=1e-6)
    hits, alarms = _curve()
    recall, precision = hits / LABELS.sum(), hits / np.maximum(hits + alarms, 1)
    assert found["pr"] == pytest.approx(-np.trapezoid(precision, recall), abs=5e-3)


@pytest.mark.parametrize("replicas", [1, 3])
def test_values_are_those_of_all_rows_for_any_number_of_replicas(replicas: int) -> None:
    ar.config.set_logical_devices("CPU", 4)
    _check(evaluated(MirroredStrategy([f"CPU:{place}" for place in range(replicas)])))


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(n, marks=pytest.mark.torture) for n in (2, 3)), 4]
)
def test_ranks_add_their_states_up(ranks: int) -> None:
    import json

    results = run_ranks(_PROGRAM, ranks)
    (line,) = [line for each in results for line in each.stdout.splitlines() if line[:1] == "{"]
    _check(json.loads(line))


@pytest.mark.parametrize("replicas", [1, 3])
def test_metrics_with_states_count_weights_in_fit(replicas: int) -> None:
    ar.config.set_logical_devices("CPU", 4)
    with MirroredStrategy([f"CPU:{place}" for place in range(replicas)]).scope():
        model = nn.Sequential([nn.Input((1,)), nn.Dense(1, activation="sigmoid")])
        measures = ["precision", metrics.Recall(0.3), metrics.AUC(50)]
        model.compile(ar.optim.SGD(0.0), "mse", weighted_metrics=measures)  # weights stay
    model.set_weights([np.full((1, 1), 4.0), np.array([-2.0])])
    weights = np.linspace(0, 2, ROWS)
    history = model.fit(SHARES, LABELS, BATCH, sample_weight=weights, verbose=0).history
    shares = model.predict(SHARES, verbose=0)
    each = weights[:, None]

    def counts(level: float) -> tuple[float, float]:
        above = shares > level
        return (each * LABELS * above).sum(), (each * (1 - LABELS) * above).sum()

    positives = (each * LABELS).sum()
    hits, alarms = counts(0.5)
    assert history["precision"] == [pytest.approx(hits / (hits + alarms), rel=1e-6)]
    assert history["recall"] == [pytest.approx(counts(0.3)[0] / positives, rel=1e-6)]
    levels = [-1.0, *np.linspace(0, 1, 50)[1:-1], 2.0]
    curve = np.array([counts(level) for level in levels]) / [positives, each.sum() - positives]
    assert history["auc"] == [pytest.approx(-np.trapezoid(curve[:, 0], curve[:, 1]), rel=1e-6)]


class Largest(metrics.Metric):
    """The largest error per thousand: a state of two counts."""

    def __init__(self, limit: float = 0.5, name: str = "far") -> None:
        super().__init__(None, name)
        self.limit = limit

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        del sample_weight
        far = ar.ops.cast(ar.ops.absolute(y_true - y_pred) > self.limit, "float64")
        return ar.ops.stack([ar.ops.sum(far), ar.ops.sum(ar.ops.ones_like(far))])

    def value(self, state: np.ndarray) -> float:
        return float(1000 * state[0] / state[1])


class Total(metrics.Metric):
    """A metric with a state of one number, and without the `value` that it needs."""

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        del y_true, sample_weight
        return ar.ops.sum(y_pred)


def test_a_metric_with_state_of_ones_own_is_trained_and_saved(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((1,)), nn.Dense(1)])
    model.compile("sgd", "mse", metrics=[Largest(0.25), metrics.F1Score(threshold=0.4)])
    history = model.fit(SHARES, LABELS, batch_size=100, epochs=2, verbose=0)
    assert set(history.history) == {"loss", "far", "f1_score"}
    far = 1000 * (np.abs(LABELS - model.predict(SHARES, verbose=0)) > 0.25).mean()
    values = model.evaluate(SHARES, LABELS, verbose=0, return_dict=True)
    assert values["far"] == pytest.approx(far)
    model.save(tmp_path / "model")
    again = nn.load_model(tmp_path / "model", custom_objects={"Largest": Largest})
    assert again.evaluate(SHARES, LABELS, verbose=0, return_dict=True) == values


def test_in_loops_of_ones_own_states_are_updated_and_reset() -> None:
    recall, mean = metrics.Recall(), metrics.Mean()
    assert np.isnan(recall.result())
    for first in range(0, ROWS, 100):
        recall.update_state(LABELS[first : first + 100], SHARES[first : first + 100])
    assert recall.result() == pytest.approx(_precision_and_recall()[1], abs=1e-6)
    recall.reset_state()
    recall.update_state([[1.0], [1.0]], [[0.9], [0.1]], sample_weight=[3.0, 1.0])
    assert recall.result() == 0.75
    mean.update_state([1.0, 2.0], [1.0, 3.0])
    mean.update_state(6.0)
    assert mean.result() == pytest.approx((1 + 6 + 6) / 5)
    several = metrics.Precision(thresholds=[0.2, 0.8])
    several.update_state([[1.0], [0.0]], [[0.9], [0.5]])
    assert several.result().tolist() == [0.5, 1.0]
    array = metrics.Precision(thresholds=np.array([0.2, 0.8]))
    array.update_state([[1.0], [0.0]], [[0.9], [0.5]])
    assert array.result().tolist() == [0.5, 1.0]
    assert array.get_config()["thresholds"] == [0.2, 0.8]
    macro = metrics.F1Score(average="macro")
    macro.update_state(np.eye(3), np.eye(3)[[0, 1, 1]])
    assert macro.result() == pytest.approx((1 + 2 / 3) / 3)


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_confusion_matrix_of_one_column_has_a_threshold(ndim: int) -> None:
    labels = np.array([0, 0, 0, 1, 1]).reshape((5, 1)[:ndim])
    shares = np.array([[0.1], [0.7], [0.5], [0.6], [0.2]])
    matrix = metrics.ConfusionMatrix(2)
    matrix.update_state(labels, shares)
    assert matrix.result().tolist() == [[2, 1], [1, 1]]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: metrics.AUC(curve="roc"), UsageError, 'curve is "ROC" or "PR"'),
        (lambda: metrics.AUC(num_thresholds=1), UsageError, "from 2, not 1"),
        (lambda: metrics.AUC(from_logits="no"), UsageError, "from_logits is True or False"),  # type: ignore[arg-type]
        (lambda: metrics.Precision(thresholds=2), UsageError, "are numbers from 0 to 1, not 2"),
        (lambda: metrics.Recall(["a"]), UsageError, "'recall': thresholds are numbers from 0 to 1"),  # type: ignore[list-item]
        (lambda: metrics.Recall([]), UsageError, "thresholds are numbers"),
        (lambda: metrics.F1Score(threshold=3), UsageError, "threshold is a number from 0 to 1"),
        (
            lambda: metrics.BinaryAccuracy(threshold=2),
            UsageError,
            "metric 'binary_accuracy': threshold is a number from 0 to 1, not 2",
        ),
        (lambda: metrics.Perplexity(ignore_class=0.5), UsageError, "ignore_class is an integer"),  # type: ignore[arg-type]
        (lambda: metrics.ConfusionMatrix(1), UsageError, "num_classes"),
        (lambda: metrics.get("confusion_matrix"), UsageError, "num_classes"),
        (lambda: metrics.TopKCategoricalAccuracy(0), UsageError, "k is an integer"),
        (
            lambda: metrics.Recall().update_state(np.ones((4, 2)), np.ones((4, 3))),
            ShapeError,
            r"metric 'recall' takes .* one shape, but found \(4, 2\) and \(4, 3\)",
        ),
        (
            lambda: metrics.Recall().update_state(np.ones((4, 1)), np.ones((4, 1)), np.ones(3)),
            ShapeError,
            "one weight per sample",
        ),
        (
            lambda: metrics.ConfusionMatrix(3).update_state(np.zeros(4), np.ones((4, 2))),
            ShapeError,
            r"'confusion_matrix' has 3 classes and takes .*\(batch, 3\), but found \(4, 2\)",
        ),
        (
            lambda: metrics.F1Score().update_state(np.ones((4, 5, 3)), np.ones((4, 5, 3))),
            ShapeError,
            r"metric 'f1_score' takes predictions \(batch, classes\), but found \(4, 5, 3\)",
        ),
        (lambda: metrics.Metric(), UsageError, "takes"),
        (
            lambda: Total().value(np.array(1.0)),
            ShapeError,
            r"metric 'total': Total.increment gives a state of shape \(\), so the class needs a "
            r"value\(self, state\)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
