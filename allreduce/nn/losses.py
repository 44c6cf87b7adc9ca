"""Losses: functions `(y_true, y_pred, from_logits=False)` that give one value per sample; classes.

A softmax right before a cross-entropy is folded into one stable kernel inside of traced functions;
probabilities from elsewhere are clipped to [1e-7, 1 - 1e-7], as Keras does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError, unknown_name
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.nn.core import objects

EPSILON = 1e-7  # Keras's


def mean_squared_error(y_true: Any, y_pred: Any, from_logits: bool = False) -> Tensor:
    """Average the squared differences along the last axis: `(batch, n)` twice to `(batch,)`.

    Args:
        y_true: `(batch, n)`, or `(batch,)` with predictions of that shape.
        y_pred: Of the same shape.
        from_logits: Not for this loss; here because all losses have one signature.

    Raises:
        ShapeError: The shapes differ; they are never broadcast against each other.
    """
    if from_logits:
        raise UsageError("mean_squared_error compares values; from_logits is for cross-entropies")
    truth, prediction = _floats("mean_squared_error", y_true, y_pred)
    squares = ops.square(ops.subtract(prediction, truth))
    return ops.mean(squares, axis=-1) if squares.ndim > 1 else squares


def categorical_crossentropy(y_true: Any, y_pred: Any, from_logits: bool = False) -> Tensor:
    """Compare a distribution per sample with the predicted one: `(batch, classes)` to `(batch,)`.

    Raises:
        ShapeError: The shapes differ.
    """
    truth, prediction = _floats("categorical_crossentropy", y_true, y_pred)
    logits = prediction if from_logits else ops.logits_of(prediction)
    if logits is not None:
        return ops.softmax_cross_entropy(truth, logits)
    total = ops.sum(prediction, axis=-1, keepdims=True)
    logs = ops.log(ops.clip(ops.divide(prediction, total), EPSILON, 1 - EPSILON))
    return ops.negative(ops.sum(ops.multiply(truth, logs), axis=-1))


def sparse_categorical_crossentropy(y_true: Any, y_pred: Any, from_logits: bool = False) -> Tensor:
    """Compare a class number per sample with the predicted distribution: to `(batch,)`.

    Args:
        y_true: `(batch,)` or `(batch, 1)`, integers from 0 to classes - 1.
        y_pred: `(batch, classes)`.
        from_logits: Whether `y_pred` are logits instead of probabilities.

    Raises:
        ShapeError: The shapes do not fit together.
    """
    prediction = as_tensor(y_pred)
    labels = class_numbers("sparse_categorical_crossentropy", as_tensor(y_true), prediction)
    logits = prediction if from_logits else ops.logits_of(prediction)
    if logits is not None:
        return ops.sparse_softmax_cross_entropy(labels, logits)
    total = ops.sum(prediction, axis=-1, keepdims=True)
    logs = ops.log(ops.clip(ops.divide(prediction, total), EPSILON, 1 - EPSILON))
    chosen = ops.one_hot(labels, _classes(prediction), dtype=prediction.dtype)
    return ops.negative(ops.sum(ops.multiply(chosen, logs), axis=-1))


def class_numbers(name: str, y_true: Tensor, y_pred: Tensor) -> Tensor:
    """Give the labels as integers of the predictions' shape without the classes.

    Raises:
        ShapeError: They are not one label per prediction.
    """
    if y_pred.ndim and y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1:
        y_true = ops.squeeze(y_true, axis=-1)
    if not y_pred.ndim or y_true.shape != y_pred.shape[:-1]:
        hint = ""
        if y_true.shape == y_pred.shape:
            hint = "; for one-hot rows use the categorical one instead of the sparse one"
        raise ShapeError(
            f"{users_line()}: {name} takes class numbers (batch,) for predictions (batch, "
            f"classes), but y_true has shape {show(y_true.shape)} and y_pred "
            f"{show(y_pred.shape)}{hint}"
        )
    if y_true.dtype.kind in "iu":
        return y_true
    # A label that is not whole becomes one that is no class, so that it is refused like those.
    whole = ops.cast(y_true, "int64")
    return ops.where(ops.equal(ops.cast(whole, y_true.dtype), y_true), whole, np.int64(-1))


def _classes(prediction: Tensor) -> int:
    size = prediction.shape[-1]
    if not isinstance(size, int):
        raise ShapeError(
            f"{users_line()}: the predictions {show(prediction.shape)} have no classes"
        )
    return size


def _floats(name: str, y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    """Check that both have one shape, and cast the truth to the prediction's dtype."""
    prediction = as_tensor(y_pred)
    if not np.issubdtype(prediction.dtype, np.floating):
        prediction = ops.cast(prediction, "float32")
    truth = as_tensor(y_true)
    if truth.shape != prediction.shape:
        raise ShapeError(
            f"{users_line()}: {name}: y_true has shape {show(truth.shape)} and y_pred "
            f"{show(prediction.shape)}; {_remedy(truth, prediction)}"
        )
    return ops.cast(truth, prediction.dtype), prediction


def _remedy(truth: Tensor, prediction: Tensor) -> str:
    if (*truth.shape, 1) == prediction.shape:
        return "they would be broadcast to every pair of samples; give y as y[:, None]"
    if truth.shape == (*prediction.shape, 1):
        return "they would be broadcast to every pair of samples; give y as y[:, 0]"
    if truth.shape == prediction.shape[:-1]:
        return "for class numbers use sparse_categorical_crossentropy"
    return "they have to be the same"


class Loss:
    """A loss function with its options, usable wherever the function is.

    Args:
        function: Takes (y_true, y_pred, from_logits).
        from_logits: Whether predictions are logits instead of probabilities.
        name: What errors call it, and histories where it is a metric.
    """

    def __init__(
        self, function: Callable[..., Tensor], from_logits: bool = False, name: str | None = None
    ) -> None:
        if not isinstance(from_logits, bool | np.bool_):
            raise UsageError(f"from_logits is True or False, not {from_logits!r}")
        self.function = function
        self.from_logits = bool(from_logits)
        self.name = name or function.__name__

    def __call__(self, y_true: Any, y_pred: Any) -> Tensor:
        return self.function(y_true, y_pred, from_logits=self.from_logits)

    def get_config(self) -> dict[str, Any]:
        """Give the constructor's arguments as plain data, save for the function.

        A subclass whose constructor takes more than these adds its own.
        """
        return {"from_logits": self.from_logits, "name": self.name}

    def __repr__(self) -> str:
        return f"<loss {self.name}{' from logits' if self.from_logits else ''}>"


class MeanSquaredError(Loss):
    """`mean_squared_error` as an object."""

    def __init__(self, name: str = "mean_squared_error") -> None:
        super().__init__(mean_squared_error, name=name)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name}


class CategoricalCrossentropy(Loss):
    """`categorical_crossentropy` as an object that knows whether it gets logits."""

    def __init__(self, from_logits: bool = False, name: str = "categorical_crossentropy") -> None:
        super().__init__(categorical_crossentropy, from_logits, name)


class SparseCategoricalCrossentropy(Loss):
    """`sparse_categorical_crossentropy` as an object that knows whether it gets logits."""

    def __init__(
        self, from_logits: bool = False, name: str = "sparse_categorical_crossentropy"
    ) -> None:
        super().__init__(sparse_categorical_crossentropy, from_logits, name)


mse = mean_squared_error

TABLE: Mapping[str, Callable[..., Tensor]] = {
    "categorical_crossentropy": categorical_crossentropy,
    "mean_squared_error": mean_squared_error,
    "mse": mean_squared_error,
    "sparse_categorical_crossentropy": sparse_categorical_crossentropy,
}
_CLASSES = (Loss, MeanSquaredError, CategoricalCrossentropy, SparseCategoricalCrossentropy)
_BY_CLASS: Mapping[str, str] = {
    "CategoricalCrossentropy": "categorical_crossentropy",
    "MeanSquaredError": "mean_squared_error",
    "SparseCategoricalCrossentropy": "sparse_categorical_crossentropy",
}


def get(identifier: Any) -> Callable[[Any, Any], Tensor]:
    """Return a loss by name; a function or Loss is itself.

    Raises:
        UsageError: There is none of that name; the message lists those that exist.
    """
    if isinstance(identifier, str):
        name = _BY_CLASS.get(identifier, identifier)
        if name not in TABLE:
            raise unknown_name("loss", identifier, TABLE)
        return TABLE[name]
    if isinstance(identifier, type):
        raise UsageError(f"a loss is an object: make one with {identifier.__name__}()")
    if callable(identifier):
        function: Callable[[Any, Any], Tensor] = identifier
        return function
    raise UsageError(f"a loss is a name or a function (y_true, y_pred), not {identifier!r}")


def serialize(loss: Callable[[Any, Any], Tensor]) -> dict[str, Any]:
    """Describe a loss as plain data.

    Raises:
        UsageError: It is an object of one's own that does not say how it was made.
    """
    if not isinstance(loss, Loss) or type(loss) not in _CLASSES:
        return objects.describe(loss, TABLE)
    options = {"from_logits": loss.from_logits, "name": loss.name}
    return {"loss": objects.describe(loss.function, TABLE), "options": options}


def deserialize(config: Any, custom: Mapping[str, Any]) -> Callable[[Any, Any], Tensor]:
    """Find or make the loss that `serialize` described, one's own among `custom`.

    Raises:
        UsageError: It is neither the library's nor among `custom`.
    """
    if isinstance(config, Mapping) and "loss" in config:
        function = objects.restore("loss", config["loss"], TABLE, custom)
        loss: Loss = objects.make(Loss, {"function": function, **(config.get("options") or {})})
        return loss
    return get(objects.restore("loss", config, TABLE, custom))
