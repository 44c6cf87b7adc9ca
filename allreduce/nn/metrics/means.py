"""Metrics that are means, or come from sums: errors, R² and perplexity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from allreduce.devices.integers import switch
from allreduce.errors import UsageError
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.nn import losses
from allreduce.nn.losses.base import check_class
from allreduce.nn.metrics.base import Metric, columns, weighted_sums, weights_of


class Mean(Metric):
    """The mean of values, in a loop of one's own: `mean.update_state(values, sample_weight)`."""

    def __init__(self, name: str = "mean") -> None:
        super().__init__(None, name)

    def increment(self, y_true: Any, y_pred: Any = None, sample_weight: Any = None) -> Tensor:
        """Add values `(batch, …)`, passed as y_true, and their weights."""
        values = as_tensor(y_true)
        weights = y_pred if sample_weight is None else sample_weight
        if not values.ndim:
            values = ops.expand_dims(values, axis=0)
        if values.ndim > 1:
            values = ops.mean(values, axis=tuple(range(1, values.ndim)))
        return weighted_sums(values, weights)

    def update_state(self, y_true: Any, y_pred: Any = None, sample_weight: Any = None) -> None:
        """Add values, with the second argument as their weights."""
        super().update_state(y_true, y_pred, sample_weight)


class MeanSquaredError(Metric):
    """The mean of the squared differences."""

    direction = "min"

    def __init__(self, name: str = "mean_squared_error") -> None:
        super().__init__(losses.mean_squared_error, name)


class RootMeanSquaredError(Metric):
    """The root of the mean of the squared differences."""

    direction = "min"

    def __init__(self, name: str = "root_mean_squared_error") -> None:
        super().__init__(losses.mean_squared_error, name)

    def value(self, state: np.ndarray) -> float:
        return math.sqrt(super().value(state))


class MeanAbsoluteError(Metric):
    """The mean of the absolute differences."""

    direction = "min"

    def __init__(self, name: str = "mean_absolute_error") -> None:
        super().__init__(losses.mean_absolute_error, name)


def cosine_similarity(y_true: Any, y_pred: Any) -> Tensor:
    """Return the cosine of the angle between two vectors: `(batch, n)` twice to `(batch,)`.

    The loss of this name is minus it.
    """
    return ops.negative(losses.cosine_similarity(y_true, y_pred))


class CosineSimilarity(Metric):
    """The mean cosine of the angles between vectors: 1 where all point the same way."""

    direction = "max"

    def __init__(self, name: str = "cosine_similarity") -> None:
        super().__init__(cosine_similarity, name)


class R2Score(Metric):
    """1 less the squared errors over the squared deviations from the mean, per column.

    Args:
        class_aggregation: "uniform_average" over columns, "variance_weighted_average", or None for
            one value per column.
    """

    direction = "max"

    def __init__(
        self, class_aggregation: str | None = "uniform_average", name: str = "r2_score"
    ) -> None:
        super().__init__(None, name)
        kinds = ("uniform_average", "variance_weighted_average", None)
        if class_aggregation not in kinds:
            raise UsageError(
                f"metric {name!r}: class_aggregation is one of {kinds}, not {class_aggregation!r}"
            )
        self.class_aggregation = class_aggregation

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Add weights, targets, their squares and the squared errors: `(4, n)`."""
        truth, prediction = columns(self.name, y_true, y_pred)
        ones = ops.ones_like(truth)
        weights = ones if sample_weight is None else ones * weights_of(truth, sample_weight)
        terms = (ones, truth, ops.square(truth), ops.square(truth - prediction))
        return ops.stack([ops.sum(weights * term, axis=0) for term in terms])

    def value(self, state: np.ndarray) -> Any:
        count, total, squares, errors = state
        if not count[0]:
            return 0.0
        spread = squares - total**2 / count
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(spread > 0, 1 - errors / spread, np.where(errors > 0, 0.0, 1.0))
        if self.class_aggregation is None:
            return scores
        if self.class_aggregation == "uniform_average":
            return float(scores.mean())
        return float((scores * spread).sum() / spread.sum())


class Perplexity(Metric):
    """e to the mean cross-entropy of class numbers, over all positions (Jelinek et al. 1977).

    Args:
        from_logits: Whether predictions are logits.
        ignore_class: The class number of positions that do not count, such as padding.
    """

    direction = "min"

    def __init__(
        self, from_logits: bool = False, ignore_class: int | None = None, name: str = "perplexity"
    ) -> None:
        super().__init__(None, name)
        self.from_logits = switch(f"metric {name!r}: from_logits", from_logits)
        self.ignore_class = check_class(f"metric {name!r}: ignore_class", ignore_class)

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        prediction = as_tensor(y_pred)
        labels = losses.class_numbers(self.name, as_tensor(y_true), prediction)
        counted = ops.cast(ops.ones_like(labels), "float64")
        if self.ignore_class is not None:
            kept = ops.not_equal(labels, self.ignore_class)
            counted = ops.cast(kept, "float64")
            labels = ops.where(kept, labels, ops.zeros_like(labels))
        if sample_weight is not None:
            counted = counted * weights_of(counted, sample_weight)
        values = losses.sparse_categorical_crossentropy(labels, prediction, self.from_logits)
        return ops.stack([ops.sum(ops.cast(values, "float64") * counted), ops.sum(counted)])

    def value(self, state: np.ndarray) -> float:
        return math.exp(super().value(state))
