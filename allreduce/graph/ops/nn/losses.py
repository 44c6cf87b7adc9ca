"""Cross-entropies of logits: softmax and loss in one stable kernel, one value per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Spec, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.array.indexing import one_hot
from allreduce.graph.ops.common import as_floats, promote_together, reshaped, through_float32
from allreduce.graph.ops.math.reduce import sum
from allreduce.graph.trace.dispatch import apply, as_tensor


def sparse_softmax_cross_entropy(labels: Any, logits: Any) -> Tensor:
    """Compute -log(softmax(logits)[label]) for each row.

    Args:
        labels: Integers, `(…)` or `(…, 1)`, in 0…classes-1; checked when the step runs.
        logits: `(…, classes)`.

    Returns:
        `(…)`, of the logits' dtype.

    Raises:
        ShapeError: Labels and logits do not fit.
        UsageError: Labels are not integers; when the step runs, a label out of range.
    """
    classes, scores = as_tensor(labels), as_floats(logits)
    if classes.dtype.kind not in "iu":
        raise UsageError(
            f"{users_line()}: labels have to be integers, got {classes.dtype}; cast them, "
            "or use the cross-entropy of one-hot targets"
        )
    if classes.ndim == scores.ndim and classes.ndim and classes.shape[-1] == 1:
        classes = reshaped(classes, classes.shape[:-1])
    return apply("sparse_softmax_cross_entropy", classes, scores)


def softmax_cross_entropy(targets: Any, logits: Any) -> Tensor:
    """Compute -sum(targets * log(softmax(logits))) for each row.

    Args:
        targets: `(…, classes)`, usually one-hot.
        logits: `(…, classes)`.

    Returns:
        `(…)`.

    Raises:
        ShapeError: The shapes differ.
    """
    return apply("softmax_cross_entropy", *promote_together(as_floats(targets), as_floats(logits)))


def _check_classes(logits: Spec) -> None:
    if not logits.ndim or logits.shape[-1] == 0:
        raise ShapeError(f"logits of shape {show(logits.shape)} have no classes")


def _sparse_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    labels, logits = specs
    _check_classes(logits)
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"labels {show(labels.shape)} do not fit logits {show(logits.shape)}: "
            f"expected one label per row, {show(logits.shape[:-1])}"
        )
    return Spec(labels.shape, logits.dtype)


def _dense_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    targets, logits = specs
    _check_classes(logits)
    if targets.shape != logits.shape:
        raise ShapeError(
            f"targets {show(targets.shape)} do not fit logits {show(logits.shape)}: "
            "expected the same shape"
        )
    return Spec(logits.shape[:-1], logits.dtype)


def _check_row(row: int, labels: np.ndarray, classes: int) -> None:
    if row >= 0:
        raise UsageError(
            f"label {labels.flat[row]} in row {row} of the replica's batch is outside of "
            f"0…{classes - 1}: the logits have {classes} classes"
        )


@through_float32
def _sparse(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    labels, logits = inputs
    numbers = labels.astype(np.int64, copy=False)
    row = _native.run_rows("sparse_softmax_cross_entropy", out, [numbers, logits])
    _check_row(row, labels, logits.shape[-1])


@through_float32
def _sparse_gradient_kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    dy, labels, logits = inputs
    numbers = labels.astype(np.int64, copy=False)
    row = _native.run_rows("sparse_softmax_cross_entropy_gradient", out, [dy, numbers, logits])
    _check_row(row, labels, logits.shape[-1])


@through_float32
def _dense(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    _native.run_rows("softmax_cross_entropy", out, inputs)


@through_float32
def _dense_gradient_kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    _native.run_rows("softmax_cross_entropy_gradient", out, inputs)


def _sparse_gradient(
    dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs
) -> list[Tensor | None]:
    return [None, apply("sparse_softmax_cross_entropy_gradient", dy, x[0], x[1])]


def _dense_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    targets, logits = x
    per_row = reshaped(dy, (*dy.shape, 1))
    return [
        -(apply("log_softmax", logits) * per_row),
        apply("softmax_cross_entropy_gradient", dy, targets, logits),
    ]


def _sparse_second(u: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor | None]:
    dy, labels, logits = x
    chosen = one_hot(labels, _classes(logits), logits.dtype)
    by_dy, _, by_logits = _second(u, dy, chosen, logits)
    return [by_dy, None, by_logits]


def _dense_second(u: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor | None]:
    return [*_second(u, *x)]


def _second(u: Tensor, dy: Tensor, targets: Tensor, logits: Tensor) -> list[Tensor]:
    """Differentiate dy·(softmax·Σtargets - targets) by dy, targets and logits."""
    shares = apply("softmax", logits)
    per_row = reshaped(dy, (*dy.shape, 1))
    total = sum(targets, axis=-1, keepdims=True)
    along = sum(u * shares, axis=-1, keepdims=True)
    return [
        sum(u * (shares * total - targets), axis=-1),
        per_row * (along - u),
        per_row * total * shares * (u - along),
    ]


def _classes(logits: Tensor) -> int:
    classes = logits.shape[-1]
    assert isinstance(classes, int)
    return classes


def _like_last(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    return specs[-1]


register("sparse_softmax_cross_entropy", _sparse_shape, _sparse, _sparse_gradient)
register(
    "sparse_softmax_cross_entropy_gradient", _like_last, _sparse_gradient_kernel, _sparse_second
)
register("softmax_cross_entropy", _dense_shape, _dense, _dense_gradient)
register("softmax_cross_entropy_gradient", _like_last, _dense_gradient_kernel, _dense_second)
