"""Losses that compare distributions: cross-entropies, focal ones and the KL divergence.

A softmax right before a cross-entropy is folded into one stable kernel inside of traced functions;
probabilities from elsewhere are clipped to [1e-7, 1 - 1e-7], as Keras does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.devices.integers import switch
from allreduce.errors import ShapeError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.nn.losses.base import (
    EPSILON,
    Loss,
    check_class,
    check_fraction,
    mean_of_last,
    same_shape,
)
from allreduce.optim.checks import checked


def categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0
) -> Tensor:
    """Compare a distribution per sample with the predicted one: `(batch, classes)` to `(batch,)`.

    Args:
        y_true: `(batch, classes)`, each row a distribution.
        y_pred: Of the same shape.
        from_logits: Whether `y_pred` are logits instead of probabilities.
        label_smoothing: How much of each row is spread evenly over all classes, from 0 to 1
            (Szegedy et al. 2016, section 7).

    Raises:
        ShapeError: The shapes differ.
    """
    truth, prediction = same_shape("categorical_crossentropy", y_true, y_pred)
    truth = _with_label_smoothing("categorical_crossentropy", truth, label_smoothing)
    logits = prediction if switch("from_logits", from_logits) else ops.logits_of(prediction)
    if logits is not None:
        return ops.softmax_cross_entropy(truth, logits)
    return ops.negative(ops.sum(ops.multiply(truth, _logs(prediction)), axis=-1))


def sparse_categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, ignore_class: int | None = None
) -> Tensor:
    """Compare a class number per sample with the predicted distribution: to `(batch,)`.

    Args:
        y_true: `(batch,)` or `(batch, 1)`, integers from 0 to classes - 1; for sequences
            `(batch, time)`.
        y_pred: `(batch, classes)`; for sequences `(batch, time, classes)`.
        from_logits: Whether `y_pred` are logits instead of probabilities.
        ignore_class: The class number of positions that count nothing, such as padding. A sequence
            averages over its other positions, and counts 0 if there are none; any integer will do.

    Raises:
        ShapeError: The shapes do not fit together.
    """
    prediction = as_tensor(y_pred)
    labels = class_numbers("sparse_categorical_crossentropy", as_tensor(y_true), prediction)
    if ignore_class is None:
        return _sparse(labels, prediction, from_logits)
    counted = ops.not_equal(labels, ignore_class)
    losses = _sparse(ops.where(counted, labels, ops.zeros_like(labels)), prediction, from_logits)
    counted = ops.cast(counted, losses.dtype)
    if losses.ndim == 1:
        return losses * counted
    axes = tuple(range(1, losses.ndim))
    return ops.sum(losses * counted, axis=axes) / ops.maximum(ops.sum(counted, axis=axes), 1)


def _sparse(labels: Tensor, prediction: Tensor, from_logits: bool) -> Tensor:
    logits = prediction if switch("from_logits", from_logits) else ops.logits_of(prediction)
    if logits is not None:
        return ops.sparse_softmax_cross_entropy(labels, logits)
    chosen = ops.one_hot(labels, _classes(prediction), dtype=prediction.dtype)
    return ops.negative(ops.sum(ops.multiply(chosen, _logs(prediction)), axis=-1))


def categorical_focal_crossentropy(
    y_true: Any,
    y_pred: Any,
    alpha: float | Sequence[float] = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
) -> Tensor:
    """As `categorical_crossentropy`, with each class's term times alpha (1 - p)^gamma.

    Well-predicted samples count little (Lin et al. 2017, section 3). Alpha may be a list of one
    number per class.

    Raises:
        ShapeError: The shapes differ.
    """
    name = "categorical_focal_crossentropy"
    truth, prediction = same_shape(name, y_true, y_pred)
    truth = _with_label_smoothing(name, truth, label_smoothing)
    logs = ops.log_softmax(prediction) if switch("from_logits", from_logits) else _logs(prediction)
    weights = np.asarray(alpha, prediction.dtype) if np.ndim(alpha) else alpha
    factor = weights * ops.power(1 - ops.exp(logs), gamma)
    return ops.negative(ops.sum(factor * truth * logs, axis=-1))


def binary_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0
) -> Tensor:
    """Average the cross-entropy of yes and no along the last axis: `(batch, n)` to `(batch,)`.

    Args:
        y_true: 0 or 1, or probabilities between; `(batch, n)` or `(batch,)`.
        y_pred: Of the same shape: the probability of 1.
        from_logits: Whether `y_pred` are logits, before a sigmoid.
        label_smoothing: Moves labels towards 1/2: 0 becomes half of it.

    Raises:
        ShapeError: The shapes differ.
    """
    truth, prediction = same_shape("binary_crossentropy", y_true, y_pred)
    truth = _with_label_smoothing("binary_crossentropy", truth, label_smoothing, 2)
    return mean_of_last(_binary(truth, prediction, from_logits))


def binary_focal_crossentropy(
    y_true: Any,
    y_pred: Any,
    apply_class_balancing: bool = False,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
) -> Tensor:
    """As `binary_crossentropy`, times (1 - p)^gamma for the probability p of the true label.

    Args:
        y_true: 0 or 1; `(batch, n)` or `(batch,)`.
        y_pred: Of the same shape.
        apply_class_balancing: Whether label 1 counts `alpha` times and 0 `1 - alpha` times.
        alpha: See above.
        gamma: How little well-predicted samples count (Lin et al. 2017, section 3.2).
        from_logits: Whether `y_pred` are logits.
        label_smoothing: As `binary_crossentropy` has it.

    Raises:
        ShapeError: The shapes differ.
    """
    truth, prediction = same_shape("binary_focal_crossentropy", y_true, y_pred)
    truth = _with_label_smoothing("binary_focal_crossentropy", truth, label_smoothing, 2)
    share = ops.sigmoid(prediction) if switch("from_logits", from_logits) else prediction
    of_truth = truth * share + (1 - truth) * (1 - share)
    values = ops.power(1 - of_truth, gamma) * _binary(truth, prediction, from_logits)
    if switch("apply_class_balancing", apply_class_balancing):
        values = (truth * alpha + (1 - truth) * (1 - alpha)) * values
    return mean_of_last(values)


def kl_divergence(y_true: Any, y_pred: Any) -> Tensor:
    """Return the sum of y_true log(y_true / y_pred): `(batch, classes)` twice to `(batch,)`.

    Both are clipped to [1e-7, 1] (Kullback and Leibler 1951).

    Raises:
        ShapeError: The shapes differ.
    """
    truth, prediction = same_shape("kl_divergence", y_true, y_pred)
    truth, prediction = ops.clip(truth, EPSILON, 1), ops.clip(prediction, EPSILON, 1)
    return ops.sum(truth * (ops.log(truth) - ops.log(prediction)), axis=-1)


def _binary(truth: Tensor, prediction: Tensor, from_logits: bool) -> Tensor:
    if switch("from_logits", from_logits):  # max(z, 0) - z y + log(1 + exp(-|z|)) overflows nowhere
        rest = ops.log1p(ops.exp(ops.negative(ops.absolute(prediction))))
        return ops.maximum(prediction, 0) - prediction * truth + rest
    share = ops.clip(prediction, EPSILON, 1 - EPSILON)
    return ops.negative(truth * ops.log(share) + (1 - truth) * ops.log(1 - share))


def _with_label_smoothing(
    name: str, truth: Tensor, label_smoothing: float, classes: int | None = None
) -> Tensor:
    """Spread a share of each row evenly over all classes; by default one per column."""
    smoothing = check_fraction(f"{name}: label_smoothing", label_smoothing)
    if not smoothing:
        return truth
    return truth * (1 - smoothing) + smoothing / (classes or _classes(truth))


def _logs(prediction: Tensor) -> Tensor:
    """Return the logarithms of shares that need not sum to 1."""
    total = ops.sum(prediction, axis=-1, keepdims=True)
    return ops.log(ops.clip(ops.divide(prediction, total), EPSILON, 1 - EPSILON))


def _factors(what: str, alpha: Any) -> float | list[float]:
    """Check a factor of all classes, or a sequence of one per class."""
    if isinstance(alpha, list | tuple | np.ndarray) and np.ndim(alpha):
        return [checked(what, each, low=0) for each in alpha]
    return checked(what, alpha, low=0)


def class_numbers(name: str, y_true: Tensor, y_pred: Tensor) -> Tensor:
    """Return the labels as integers of the predictions' shape without the classes.

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


class CategoricalCrossentropy(Loss):
    """`categorical_crossentropy` as an object with its options."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        *,
        name: str = "categorical_crossentropy",
    ) -> None:
        smoothing = check_fraction(f"loss {name!r}: label_smoothing", label_smoothing)
        options = {"from_logits": from_logits, "label_smoothing": smoothing}
        super().__init__(categorical_crossentropy, name, **options)


class SparseCategoricalCrossentropy(Loss):
    """`sparse_categorical_crossentropy` as an object with its options."""

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        *,
        name: str = "sparse_categorical_crossentropy",
    ) -> None:
        ignored = check_class(f"loss {name!r}: ignore_class", ignore_class)
        options = {"from_logits": from_logits, "ignore_class": ignored}
        super().__init__(sparse_categorical_crossentropy, name, **options)


class CategoricalFocalCrossentropy(Loss):
    """`categorical_focal_crossentropy` as an object with its options."""

    def __init__(
        self,
        alpha: float | Sequence[float] = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        *,
        name: str = "categorical_focal_crossentropy",
    ) -> None:
        super().__init__(
            categorical_focal_crossentropy,
            name,
            alpha=_factors(f"loss {name!r}: alpha", alpha),
            gamma=checked(f"loss {name!r}: gamma", gamma, low=0),
            from_logits=from_logits,
            label_smoothing=check_fraction(f"loss {name!r}: label_smoothing", label_smoothing),
        )


class BinaryCrossentropy(Loss):
    """`binary_crossentropy` as an object with its options."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        *,
        name: str = "binary_crossentropy",
    ) -> None:
        smoothing = check_fraction(f"loss {name!r}: label_smoothing", label_smoothing)
        options = {"from_logits": from_logits, "label_smoothing": smoothing}
        super().__init__(binary_crossentropy, name, **options)


class BinaryFocalCrossentropy(Loss):
    """`binary_focal_crossentropy` as an object with its options."""

    def __init__(
        self,
        apply_class_balancing: bool = False,
        alpha: float = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        *,
        name: str = "binary_focal_crossentropy",
    ) -> None:
        super().__init__(
            binary_focal_crossentropy,
            name,
            apply_class_balancing=apply_class_balancing,
            alpha=check_fraction(f"loss {name!r}: alpha", alpha),
            gamma=checked(f"loss {name!r}: gamma", gamma, low=0),
            from_logits=from_logits,
            label_smoothing=check_fraction(f"loss {name!r}: label_smoothing", label_smoothing),
        )


class KLDivergence(Loss):
    """`kl_divergence` as an object."""

    def __init__(self, *, name: str = "kl_divergence") -> None:
        super().__init__(kl_divergence, name)
