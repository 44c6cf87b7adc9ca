"""Metrics: functions `(y_true, y_pred)` that give one value per sample, and classes with state.

A new metric is a class in one of these files, and its row in `CLASSES`; one with a function per
sample has a row in `TABLE`, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allreduce.errors import UsageError, unknown_name
from allreduce.nn import losses
from allreduce.nn.core import objects
from allreduce.nn.metrics.accuracy import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
    accuracy,
    binary_accuracy,
    categorical_accuracy,
    sparse_categorical_accuracy,
    sparse_top_k_categorical_accuracy,
    top_k_categorical_accuracy,
)
from allreduce.nn.metrics.base import Measure, Metric, default_name
from allreduce.nn.metrics.confusion import AUC, ConfusionMatrix, F1Score, Precision, Recall
from allreduce.nn.metrics.means import (
    CosineSimilarity,
    Mean,
    MeanAbsoluteError,
    MeanSquaredError,
    Perplexity,
    R2Score,
    RootMeanSquaredError,
    cosine_similarity,
)

__all__ = [
    "AUC",
    "CLASSES",
    "TABLE",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "ConfusionMatrix",
    "CosineSimilarity",
    "F1Score",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Measure",
    "Metric",
    "Perplexity",
    "Precision",
    "R2Score",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "accuracy",
    "binary_accuracy",
    "categorical_accuracy",
    "cosine_similarity",
    "deserialize",
    "direction_of",
    "get",
    "serialize",
    "sparse_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
    "top_k_categorical_accuracy",
]

TABLE: Mapping[str, Measure] = {
    "accuracy": accuracy,
    "binary_accuracy": binary_accuracy,
    "categorical_accuracy": categorical_accuracy,
    "sparse_categorical_accuracy": sparse_categorical_accuracy,
    "sparse_top_k_categorical_accuracy": sparse_top_k_categorical_accuracy,
    "top_k_categorical_accuracy": top_k_categorical_accuracy,
    **losses.TABLE,
    "cosine_similarity": cosine_similarity,
}
_KINDS = (
    AUC,
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    ConfusionMatrix,
    CosineSimilarity,
    F1Score,
    Mean,
    MeanAbsoluteError,
    MeanSquaredError,
    Perplexity,
    Precision,
    R2Score,
    Recall,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
# By their own names and as histories call them: "F1Score" and "f1_score".
CLASSES: Mapping[str, type[Metric]] = {
    name: kind for kind in _KINDS for name in (kind.__name__, default_name(kind))
}
# What "accuracy" means beside a loss with such targets; beside others the shapes decide.
_ACCURACY_OF: Mapping[str, Measure] = {
    "binary": binary_accuracy,
    "classes": categorical_accuracy,
    "class numbers": sparse_categorical_accuracy,
}


def get(identifier: Any, loss: Any = None) -> tuple[str, Measure]:
    """Return a metric's name in histories, and its function or Metric.

    Args:
        identifier: A name, a Metric, or a function (y_true, y_pred).
        loss: The loss beside it, which says what "accuracy" means.

    Raises:
        UsageError: The name is unknown; the message lists the existing ones.
    """
    if isinstance(identifier, str):
        if identifier in ("accuracy", "acc"):
            row = losses.row_of(loss)
            return identifier, _ACCURACY_OF.get(row.targets if row else "", accuracy)
        if identifier in TABLE:
            return identifier, TABLE[identifier]
        if identifier in CLASSES:
            made: Metric = objects.make(CLASSES[identifier], {})
            return made.name, made
        known = {*TABLE, *(default_name(kind) for kind in _KINDS)}
        raise unknown_name("metric", identifier, known)
    if isinstance(identifier, (losses.Loss, Metric)):
        return identifier.name, identifier
    if callable(identifier) and not isinstance(identifier, type):
        return getattr(identifier, "__name__", type(identifier).__name__), identifier
    hint = f"; make one: {identifier.__name__}()" if isinstance(identifier, type) else ""
    raise UsageError(f"a metric is a name or a function (y_true, y_pred), not {identifier!r}{hint}")


def direction_of(metric: Metric) -> str | None:
    """Return whether a better value is larger, "max", or smaller, "min"; None if it is not known.

    Losses fall, the library's accuracies and similarities rise.
    """
    if metric.direction is not None:
        return metric.direction
    if type(metric) is not Metric:  # its value may be anything
        return None
    function = metric.function
    if isinstance(function, losses.Loss) or losses.row_of(function) is not None:
        return "min"
    return "max" if any(function is each for each in TABLE.values()) else None


def serialize(identifier: Any) -> Any:
    """Describe an identifier of `get` as plain data; a name describes itself.

    Raises:
        UsageError: It is a user's object without `get_config`.
    """
    if isinstance(identifier, str):
        return identifier
    if isinstance(identifier, losses.Loss):
        return losses.serialize(identifier)
    if type(identifier) is Metric:
        described = objects.describe(identifier.function, TABLE)
        return {"metric": described, "name": identifier.name}
    if type(identifier) in _KINDS:
        return {"class": type(identifier).__name__, "config": identifier.get_config()}
    if losses.row_of(identifier) is not None:  # its name may be that of another metric
        return {"loss": objects.describe(identifier, losses.TABLE)}
    return objects.describe(identifier, TABLE)


def deserialize(config: Any, custom: Mapping[str, Any]) -> Any:
    """Return the identifier that `serialize` described; `custom` has the user's own by name.

    Raises:
        UsageError: It is neither the library's nor in `custom`.
    """
    if isinstance(config, str):
        return config
    if isinstance(config, Mapping) and "loss" in config:
        return losses.deserialize(config, custom)
    if isinstance(config, Mapping) and "metric" in config:
        function = objects.restore("metric", config["metric"], TABLE, custom)
        return objects.make(Metric, {"function": function, "name": config.get("name")})
    if isinstance(config, Mapping) and "class" in config:
        name = config["class"]
        if name not in CLASSES:
            raise unknown_name("metric", name, CLASSES)
        return objects.make(CLASSES[name], config.get("config") or {})
    return objects.restore("metric", config, TABLE, custom)
