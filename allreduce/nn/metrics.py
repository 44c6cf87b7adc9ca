"""Metrics: functions `(y_true, y_pred)` that give one value per sample, to be averaged; classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allreduce.errors import ShapeError, UsageError, unknown_name
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.nn import losses
from allreduce.nn.core import objects

Measure = Callable[[Any, Any], Tensor]


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Give 1 where the likeliest class is the label, else 0: `(batch,)`."""
    prediction = as_tensor(y_pred)
    labels = losses.class_numbers("sparse_categorical_accuracy", as_tensor(y_true), prediction)
    return _hits(labels, prediction)


def categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Give 1 where the likeliest class is the one-hot row's, else 0: `(batch,)`."""
    truth, prediction = as_tensor(y_true), as_tensor(y_pred)
    if truth.shape != prediction.shape or not truth.ndim:
        raise ShapeError(
            f"{users_line()}: categorical_accuracy takes one-hot rows of the predictions' shape, "
            f"but y_true has shape {show(truth.shape)} and y_pred {show(prediction.shape)}"
        )
    return _hits(ops.argmax(truth, axis=-1), prediction)


def accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Give 1 where the likeliest class is the true one; labels may be one-hot or not."""
    truth, prediction = as_tensor(y_true), as_tensor(y_pred)
    if prediction.ndim and prediction.shape[-1] == 1:
        raise ShapeError(
            f"{users_line()}: accuracy compares classes, but y_pred has shape "
            f"{show(prediction.shape)}: one value per sample is no choice among classes"
        )
    if truth.shape == prediction.shape:
        return categorical_accuracy(truth, prediction)
    return sparse_categorical_accuracy(truth, prediction)


def _hits(labels: Tensor, prediction: Tensor) -> Tensor:
    # The largest logit is the largest share, so a softmax in between need not be computed.
    logits = ops.logits_of(prediction)
    chosen = ops.argmax(prediction if logits is None else logits, axis=-1)
    return ops.cast(ops.equal(chosen, ops.cast(labels, "int64")), "float32")


class Metric:
    """A metric function with a name, usable wherever the function is.

    It keeps nothing: `fit` and `evaluate` average what it gives for each sample.

    Args:
        function: Takes (y_true, y_pred).
        name: What histories call it.
    """

    def __init__(self, function: Measure, name: str | None = None) -> None:
        if not callable(function):
            raise UsageError(f"a Metric's function takes (y_true, y_pred), and is not {function!r}")
        if name is not None and not isinstance(name, str):
            raise UsageError(f"the name of a metric is a string, not {name!r}")
        self.function = function
        self.name = str(name or getattr(function, "__name__", type(function).__name__))

    def __call__(self, y_true: Any, y_pred: Any) -> Tensor:
        return self.function(y_true, y_pred)

    def get_config(self) -> dict[str, Any]:
        """Give the constructor's arguments as plain data, save for the function.

        A subclass whose constructor takes more than these adds its own.
        """
        return {"name": self.name}

    def __repr__(self) -> str:
        return f"<metric {self.name}>"


class Accuracy(Metric):
    """`accuracy` as an object: as the name "accuracy", it compares classes, not values."""

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(accuracy, name)


class CategoricalAccuracy(Metric):
    """`categorical_accuracy` as an object."""

    def __init__(self, name: str = "categorical_accuracy") -> None:
        super().__init__(categorical_accuracy, name)


class SparseCategoricalAccuracy(Metric):
    """`sparse_categorical_accuracy` as an object."""

    def __init__(self, name: str = "sparse_categorical_accuracy") -> None:
        super().__init__(sparse_categorical_accuracy, name)


TABLE: Mapping[str, Measure] = {
    "accuracy": accuracy,
    "categorical_accuracy": categorical_accuracy,
    "categorical_crossentropy": losses.categorical_crossentropy,
    "mean_squared_error": losses.mean_squared_error,
    "mse": losses.mean_squared_error,
    "sparse_categorical_accuracy": sparse_categorical_accuracy,
    "sparse_categorical_crossentropy": losses.sparse_categorical_crossentropy,
}
_CLASSES = (Metric, Accuracy, CategoricalAccuracy, SparseCategoricalAccuracy)
# What "accuracy" means beside these losses; beside others the shapes decide.
_ACCURACY_OF: Mapping[Any, Measure] = {
    losses.categorical_crossentropy: categorical_accuracy,
    losses.sparse_categorical_crossentropy: sparse_categorical_accuracy,
}


def get(identifier: Any, loss: Any = None) -> tuple[str, Measure]:
    """Return a metric's name in histories, and its function.

    Args:
        identifier: A name, a Metric, or a function (y_true, y_pred).
        loss: The loss beside it, which says what "accuracy" means.

    Raises:
        UsageError: There is none of that name; the message lists those that exist.
    """
    if isinstance(identifier, str):
        if identifier not in TABLE:
            raise unknown_name("metric", identifier, TABLE)
        if identifier == "accuracy":
            kind = loss.function if isinstance(loss, losses.Loss) else loss
            return identifier, _ACCURACY_OF.get(kind, accuracy)
        return identifier, TABLE[identifier]
    if isinstance(identifier, (losses.Loss, Metric)):
        return identifier.name, identifier
    if callable(identifier) and not isinstance(identifier, type):
        return getattr(identifier, "__name__", type(identifier).__name__), identifier
    hint = f"; make one: {identifier.__name__}()" if isinstance(identifier, type) else ""
    raise UsageError(f"a metric is a name or a function (y_true, y_pred), not {identifier!r}{hint}")


def serialize(identifier: Any) -> Any:
    """Describe what `get` was given as plain data: a name is itself.

    Raises:
        UsageError: It is an object of one's own that does not say how it was made.
    """
    if isinstance(identifier, str):
        return identifier
    if isinstance(identifier, losses.Loss):
        return losses.serialize(identifier)
    if type(identifier) in _CLASSES:
        described = objects.describe(identifier.function, TABLE)
        return {"metric": described, "name": identifier.name}
    return objects.describe(identifier, TABLE)


def deserialize(config: Any, custom: Mapping[str, Any]) -> Any:
    """Find what `serialize` described, one's own among `custom`, for `get`.

    Raises:
        UsageError: It is neither the library's nor among `custom`.
    """
    if isinstance(config, str):
        return config
    if isinstance(config, Mapping) and "loss" in config:
        return losses.deserialize(config, custom)
    if isinstance(config, Mapping) and "metric" in config:
        function = objects.restore("metric", config["metric"], TABLE, custom)
        return objects.make(Metric, {"function": function, "name": config.get("name")})
    return objects.restore("metric", config, TABLE, custom)
