"""Accuracies: how many predictions name the true class. Functions give 1 or 0 per sample."""

from __future__ import annotations

from typing import Any

from allreduce.devices.integers import integer
from allreduce.errors import ShapeError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.nn import losses
from allreduce.nn.losses.base import check_fraction, mean_of_last, same_shape
from allreduce.nn.metrics.base import Metric


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return 1 where the likeliest class is the label, else 0: `(batch,)`."""
    prediction = as_tensor(y_pred)
    labels = losses.class_numbers("sparse_categorical_accuracy", as_tensor(y_true), prediction)
    return _hits(labels, prediction)


def categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return 1 where the likeliest class is the one-hot row's, else 0: `(batch,)`."""
    truth, prediction = _one_hot_rows("categorical_accuracy", y_true, y_pred)
    return _hits(ops.argmax(truth, axis=-1), prediction)


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> Tensor:
    """Return the share of labels, 0 or 1, that predictions above the threshold meet: `(batch,)`."""
    truth, prediction = same_shape("binary_accuracy", y_true, y_pred)
    chosen = ops.cast(ops.greater(prediction, threshold), truth.dtype)
    return mean_of_last(ops.cast(ops.equal(truth, chosen), "float32"))


def top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> Tensor:
    """Return 1 where the one-hot row's class is among the k likeliest, else 0: `(batch,)`."""
    truth, prediction = _one_hot_rows("top_k_categorical_accuracy", y_true, y_pred)
    return _hits_of_top("top_k_categorical_accuracy", ops.argmax(truth, axis=-1), prediction, k)


def sparse_top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> Tensor:
    """Return 1 where the label is among the k likeliest classes, else 0: `(batch,)`."""
    prediction, name = as_tensor(y_pred), "sparse_top_k_categorical_accuracy"
    labels = losses.class_numbers(name, as_tensor(y_true), prediction)
    return _hits_of_top(name, labels, prediction, k)


def accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return 1 where the likeliest class is the true one; labels may be one-hot or not."""
    truth, prediction = as_tensor(y_true), as_tensor(y_pred)
    if prediction.ndim and prediction.shape[-1] == 1:
        raise ShapeError(
            f"{users_line()}: accuracy compares classes, but y_pred has shape "
            f"{show(prediction.shape)}: one value per sample is no choice among classes; for a "
            "probability use binary_accuracy"
        )
    if truth.shape == prediction.shape:
        return categorical_accuracy(truth, prediction)
    return sparse_categorical_accuracy(truth, prediction)


def _one_hot_rows(name: str, y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    truth, prediction = as_tensor(y_true), as_tensor(y_pred)
    if truth.shape != prediction.shape or not truth.ndim:
        raise ShapeError(
            f"{users_line()}: {name} takes one-hot rows of the predictions' shape, "
            f"but y_true has shape {show(truth.shape)} and y_pred {show(prediction.shape)}"
        )
    return truth, prediction


def _hits(labels: Tensor, prediction: Tensor) -> Tensor:
    # The largest logit is the largest share, so a softmax in between need not be computed.
    logits = ops.logits_of(prediction)
    chosen = ops.argmax(prediction if logits is None else logits, axis=-1)
    return ops.cast(ops.equal(chosen, ops.cast(labels, "int64")), "float32")


def _hits_of_top(name: str, labels: Tensor, prediction: Tensor, k: int) -> Tensor:
    classes = prediction.shape[-1]
    if isinstance(classes, int) and classes < k:
        raise ShapeError(
            f"{users_line()}: {name} looks among the {k} likeliest classes, but y_pred has shape "
            f"{show(prediction.shape)}; give its class a smaller k"
        )
    logits = ops.logits_of(prediction)
    _, chosen = ops.top_k(prediction if logits is None else logits, k)
    hits = ops.equal(chosen, ops.expand_dims(ops.cast(labels, "int64"), axis=labels.ndim))
    return ops.max(ops.cast(hits, "float32"), axis=-1)


class Accuracy(Metric):
    """`accuracy` as an object: as the name "accuracy", it compares classes, not values."""

    direction = "max"

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(accuracy, name)


class CategoricalAccuracy(Metric):
    """`categorical_accuracy` as an object."""

    direction = "max"

    def __init__(self, name: str = "categorical_accuracy") -> None:
        super().__init__(categorical_accuracy, name)


class SparseCategoricalAccuracy(Metric):
    """`sparse_categorical_accuracy` as an object."""

    direction = "max"

    def __init__(self, name: str = "sparse_categorical_accuracy") -> None:
        super().__init__(sparse_categorical_accuracy, name)


class BinaryAccuracy(Metric):
    """`binary_accuracy` as an object that knows its threshold."""

    direction = "max"

    def __init__(self, name: str = "binary_accuracy", threshold: float = 0.5) -> None:
        super().__init__(binary_accuracy, name)
        self.threshold = check_fraction(f"metric {name!r}: threshold", threshold)

    def __call__(self, y_true: Any, y_pred: Any) -> Tensor:
        return binary_accuracy(y_true, y_pred, self.threshold)


class TopKCategoricalAccuracy(Metric):
    """`top_k_categorical_accuracy` as an object that knows its k."""

    direction = "max"

    def __init__(self, k: int = 5, name: str = "top_k_categorical_accuracy") -> None:
        super().__init__(top_k_categorical_accuracy, name)
        self.k = integer("k", k, 1)

    def __call__(self, y_true: Any, y_pred: Any) -> Tensor:
        return top_k_categorical_accuracy(y_true, y_pred, self.k)


class SparseTopKCategoricalAccuracy(Metric):
    """`sparse_top_k_categorical_accuracy` as an object that knows its k."""

    direction = "max"

    def __init__(self, k: int = 5, name: str = "sparse_top_k_categorical_accuracy") -> None:
        super().__init__(sparse_top_k_categorical_accuracy, name)
        self.k = integer("k", k, 1)

    def __call__(self, y_true: Any, y_pred: Any) -> Tensor:
        return sparse_top_k_categorical_accuracy(y_true, y_pred, self.k)
