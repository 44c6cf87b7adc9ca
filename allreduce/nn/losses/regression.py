"""Losses that compare values: `(batch, n)` twice to `(batch,)`."""

from __future__ import annotations

from typing import Any

from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.nn.losses.base import EPSILON, Loss, mean_of_last, same_shape
from allreduce.optim.checks import checked


def mean_squared_error(y_true: Any, y_pred: Any) -> Tensor:
    """Average the squared differences along the last axis: `(batch, n)` twice to `(batch,)`.

    Args:
        y_true: `(batch, n)`, or `(batch,)` with predictions of that shape.
        y_pred: Of the same shape.

    Raises:
        ShapeError: The shapes differ; they are never broadcast against each other.
    """
    truth, prediction = same_shape("mean_squared_error", y_true, y_pred)
    return mean_of_last(ops.square(ops.subtract(prediction, truth)))


def mean_absolute_error(y_true: Any, y_pred: Any) -> Tensor:
    """Average the absolute differences along the last axis: `(batch, n)` twice to `(batch,)`.

    Raises:
        ShapeError: The shapes differ.
    """
    truth, prediction = same_shape("mean_absolute_error", y_true, y_pred)
    return mean_of_last(ops.absolute(ops.subtract(prediction, truth)))


def huber(y_true: Any, y_pred: Any, delta: float = 1.0) -> Tensor:
    """Average Huber's loss along the last axis: `(batch, n)` twice to `(batch,)`.

    A difference d counts d²/2 up to `delta`, and `delta` (|d| - `delta`/2) above (Huber 1964,
    section 2).

    Raises:
        ShapeError: The shapes differ.
        UsageError: `delta` is not above 0.
    """
    delta = checked("huber: delta", delta, low=0, above=True)
    truth, prediction = same_shape("huber", y_true, y_pred)
    distance = ops.absolute(ops.subtract(prediction, truth))
    near = ops.minimum(distance, delta)
    # near is the distance up to delta, and delta above: one form for both branches.
    return mean_of_last(near * (distance - 0.5 * near))


def hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Average max(1 - y_true · y_pred, 0) along the last axis: `(batch, n)` twice to `(batch,)`.

    Args:
        y_true: -1 or 1; a 0 counts as -1.
        y_pred: Scores of the same shape.

    Raises:
        ShapeError: The shapes differ.
    """
    truth, prediction = same_shape("hinge", y_true, y_pred)
    signs = ops.where(ops.equal(truth, 0), -1.0, truth)
    return mean_of_last(ops.maximum(1 - ops.cast(signs, prediction.dtype) * prediction, 0))


def cosine_similarity(y_true: Any, y_pred: Any) -> Tensor:
    """Return minus the cosine of the angle between two vectors: `(batch, n)` twice to `(batch,)`.

    -1 where they point the same way, 0 where one is a vector of zeros.

    Raises:
        ShapeError: The shapes differ.
    """
    truth, prediction = same_shape("cosine_similarity", y_true, y_pred)
    return ops.negative(ops.sum(_unit(truth) * _unit(prediction), axis=-1))


def _unit(vectors: Tensor) -> Tensor:
    squares = ops.sum(ops.square(vectors), axis=-1, keepdims=True)
    return vectors / ops.sqrt(ops.maximum(squares, EPSILON**2))


class MeanSquaredError(Loss):
    """`mean_squared_error` as an object."""

    def __init__(self, *, name: str = "mean_squared_error") -> None:
        super().__init__(mean_squared_error, name)


class MeanAbsoluteError(Loss):
    """`mean_absolute_error` as an object."""

    def __init__(self, *, name: str = "mean_absolute_error") -> None:
        super().__init__(mean_absolute_error, name)


class Huber(Loss):
    """`huber` as an object that knows its delta."""

    def __init__(self, delta: float = 1.0, *, name: str = "huber_loss") -> None:
        delta = checked(f"loss {name!r}: delta", delta, low=0, above=True)
        super().__init__(huber, name, delta=delta)


class Hinge(Loss):
    """`hinge` as an object."""

    def __init__(self, *, name: str = "hinge") -> None:
        super().__init__(hinge, name)


class CosineSimilarity(Loss):
    """`cosine_similarity` as an object."""

    def __init__(self, *, name: str = "cosine_similarity") -> None:
        super().__init__(cosine_similarity, name)
