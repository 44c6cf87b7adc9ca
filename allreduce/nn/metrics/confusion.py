"""Metrics of counts: how often which class was predicted for which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.devices.integers import integer, switch
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.nn import losses
from allreduce.nn.losses.base import check_fraction
from allreduce.nn.metrics.base import Metric, columns, weights_of


def _counts(
    name: str, y_true: Any, y_pred: Any, thresholds: np.ndarray, sample_weight: Any
) -> Tensor:
    """Count predictions above each threshold: true and false positives, positives, negatives.

    Returns:
        `(4, thresholds)`, over all columns.
    """
    truth, prediction = columns(name, y_true, y_pred)
    weights = ops.ones_like(truth)
    if sample_weight is not None:
        weights = weights * weights_of(truth, sample_weight)
    yes, no = weights * truth, weights * (1 - truth)
    above = ops.cast(ops.greater(ops.expand_dims(prediction, axis=2), thresholds), "float64")
    positives, negatives = ops.sum(yes), ops.sum(no)
    return ops.stack(
        [
            ops.sum(ops.expand_dims(yes, axis=2) * above, axis=(0, 1)),
            ops.sum(ops.expand_dims(no, axis=2) * above, axis=(0, 1)),
            positives * np.ones(len(thresholds)),
            negatives * np.ones(len(thresholds)),
        ]
    )


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Divide, with 0 where there is nothing to divide by."""
    shares = np.zeros_like(above)
    np.divide(above, below, out=shares, where=below != 0)
    return shares


class _Thresholded(Metric):
    """A metric of labels 0 or 1 and the predictions above thresholds.

    Args:
        thresholds: A number, or several for one value each; 0.5 by default.
    """

    direction = "max"

    def __init__(self, thresholds: float | Sequence[float] | np.ndarray | None, name: str) -> None:
        super().__init__(None, name)
        try:
            levels = np.asarray(0.5 if thresholds is None else thresholds)
            is_fit = levels.dtype.kind in "iuf" and levels.ndim < 2 and levels.size
        except ValueError:  # lists of several lengths
            is_fit = False
        if not is_fit or not np.all((levels >= 0) & (levels <= 1)):
            raise UsageError(
                f"metric {name!r}: thresholds are numbers from 0 to 1, not {thresholds!r}"
            )
        # Plain numbers, as these are saved.
        self.thresholds = None if thresholds is None else levels.astype(float).tolist()
        self._levels = np.atleast_1d(levels.astype(float))

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        return _counts(self.name, y_true, y_pred, self._levels, sample_weight)

    def _given(self, values: np.ndarray) -> Any:
        return values if isinstance(self.thresholds, list) else float(values[0])


class Precision(_Thresholded):
    """The share of positive predictions that are true."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | np.ndarray | None = None,
        name: str = "precision",
    ) -> None:
        super().__init__(thresholds, name)

    def value(self, state: np.ndarray) -> Any:
        return self._given(_divided(state[0], state[0] + state[1]))


class Recall(_Thresholded):
    """The share of positive samples that are predicted so."""

    def __init__(
        self, thresholds: float | Sequence[float] | np.ndarray | None = None, name: str = "recall"
    ) -> None:
        super().__init__(thresholds, name)

    def value(self, state: np.ndarray) -> Any:
        return self._given(_divided(state[0], state[2]))


class AUC(Metric):
    """The area under a curve of thresholds, by the trapezoidal rule.

    Args:
        num_thresholds: How many points the curve has, evenly spaced from 0 to 1.
        curve: "ROC" (true over false positive rate) or "PR" (precision over recall, interpolated as
            Davis and Goadrich 2006, section 4).
        from_logits: Whether predictions are logits, before a sigmoid.
    """

    direction = "max"

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        name: str = "auc",
        from_logits: bool = False,
    ) -> None:
        super().__init__(None, name)
        if not isinstance(curve, str) or curve not in ("ROC", "PR"):
            raise UsageError(f'metric {name!r}: curve is "ROC" or "PR", not {curve!r}')
        self.num_thresholds = integer(f"metric {name!r}: num_thresholds", num_thresholds, 2)
        self.from_logits = switch(f"metric {name!r}: from_logits", from_logits)
        self.curve = curve
        self._levels = np.linspace(0, 1, num_thresholds)
        self._levels[[0, -1]] = -1e-7, 1 + 1e-7  # all are above the first, and none above the last

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        shares = ops.sigmoid(as_tensor(y_pred)) if self.from_logits else y_pred
        return _counts(self.name, y_true, shares, self._levels, sample_weight)

    def value(self, state: np.ndarray) -> float:
        hits, false_alarms, positives, negatives = state
        if self.curve == "PR":
            return _area_of_precision(hits, false_alarms, positives)
        rate, false_rate = _divided(hits, positives), _divided(false_alarms, negatives)
        return float(np.sum((false_rate[:-1] - false_rate[1:]) * (rate[:-1] + rate[1:]) / 2))


def _area_of_precision(hits: np.ndarray, false_alarms: np.ndarray, positives: np.ndarray) -> float:
    """Integrate precision over recall; between two points hits and predictions grow in step."""
    predicted = hits + false_alarms
    more_hits, more = hits[:-1] - hits[1:], predicted[:-1] - predicted[1:]
    slope = _divided(more_hits, more)
    start = hits[1:] - slope * predicted[1:]
    both = (predicted[:-1] > 0) & (predicted[1:] > 0)
    growth = np.divide(predicted[:-1], predicted[1:], out=np.ones_like(more), where=both)
    areas = slope * (more_hits + start * np.log(growth))
    return float(np.sum(_divided(areas, positives[1:])))


class F1Score(Metric):
    """The harmonic mean of precision and recall, per column of `(batch, classes)`.

    Args:
        average: None for one value per class, "micro" (over all counts), "macro" (their mean) or
            "weighted" (by how often each class occurs).
        threshold: Above it a prediction counts as 1. None: the largest of a row counts; with one
            column, 0.5.

    Returns:
        An array of one value per class, or a float with an average or a single column.
    """

    direction = "max"

    def __init__(
        self, average: str | None = None, threshold: float | None = None, name: str = "f1_score"
    ) -> None:
        super().__init__(None, name)
        kinds = (None, "micro", "macro", "weighted")
        if not isinstance(average, str | None) or average not in kinds:
            raise UsageError(f"metric {name!r}: average is one of {kinds}, not {average!r}")
        what = f"metric {name!r}: threshold"
        self.threshold = None if threshold is None else check_fraction(what, threshold)
        self.average = average

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Count hits, predictions and truths per class: `(3, classes)`."""
        shape = as_tensor(y_pred).shape
        if len(shape) > 2:
            raise ShapeError(
                f"{users_line()}: metric {self.name!r} takes predictions (batch, classes), but "
                f"found {show(shape)}; reshape both to one row per prediction"
            )
        truth, prediction = columns(self.name, y_true, y_pred)
        classes = prediction.shape[1]
        assert isinstance(classes, int)
        if self.threshold is None and classes > 1:
            chosen = ops.one_hot(ops.argmax(prediction, axis=-1), classes, dtype="float64")
        else:
            level = 0.5 if self.threshold is None else self.threshold
            chosen = ops.cast(ops.greater(prediction, level), "float64")
        weights = ops.ones_like(truth)
        if sample_weight is not None:
            weights = weights * weights_of(truth, sample_weight)
        terms = (truth * chosen, chosen, truth)
        return ops.stack([ops.sum(weights * term, axis=0) for term in terms])

    def value(self, state: np.ndarray) -> Any:
        if self.average == "micro":
            state = state.sum(axis=1, keepdims=True)
        hits, predicted, true = state
        scores = _divided(2 * hits, predicted + true)
        if self.average == "weighted":
            return float(np.average(scores, weights=true)) if true.sum() else 0.0
        return float(scores.mean()) if self.average or len(scores) == 1 else scores


class ConfusionMatrix(Metric):
    """How often each class was taken for which: row i, column j counts class i predicted as j.

    Args:
        num_classes: The number of classes: of predictions `(batch, num_classes)`, or 2 for a single
            column, where above 0.5 is class 1.

    Returns:
        An array `(num_classes, num_classes)`: int64, or float64 with weights that are not whole.
    """

    def __init__(self, num_classes: int, name: str = "confusion_matrix") -> None:
        super().__init__(None, name)
        self.num_classes = integer("num_classes", num_classes, 2)

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        truth, prediction = as_tensor(y_true), as_tensor(y_pred)
        found = prediction.shape[1] if prediction.ndim == 2 else None
        is_binary = found == 1 and self.num_classes == 2
        if found != self.num_classes and not is_binary:
            one = " or (batch, 1)" if self.num_classes == 2 else ""
            raise ShapeError(
                f"{users_line()}: metric {self.name!r} has {self.num_classes} classes and takes "
                f"predictions (batch, {self.num_classes}){one}, but found {show(prediction.shape)}"
            )
        if truth.shape == prediction.shape and not is_binary:  # one-hot rows
            truth = ops.argmax(truth, axis=-1)
        labels = losses.class_numbers(self.name, truth, prediction)
        if is_binary:
            chosen = ops.cast(ops.greater(ops.squeeze(prediction, axis=-1), 0.5), "int64")
        else:
            chosen = ops.argmax(prediction, axis=-1)
        rows = ops.one_hot(labels, self.num_classes, dtype="float64")
        if sample_weight is not None:
            rows = rows * weights_of(rows, sample_weight)
        return ops.matmul(
            ops.transpose(rows), ops.one_hot(chosen, self.num_classes, dtype="float64")
        )

    def value(self, state: np.ndarray) -> np.ndarray:
        whole = np.rint(state)
        return whole.astype(np.int64) if np.array_equal(whole, state) else state
