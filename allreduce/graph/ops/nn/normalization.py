"""Normalisation to mean 0 and variance 1 along some axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axes, as_number, as_shape
from allreduce.graph.ops.common import as_floats, reshaped, same_spec, through_float32
from allreduce.graph.ops.math.elementwise import sqrt
from allreduce.graph.ops.math.reduce import mean, var
from allreduce.graph.trace.dispatch import apply


def normalize(x: Any, axis: int | Sequence[int] | None = -1, epsilon: float = 1e-5) -> Tensor:
    """Compute (x - mean) / sqrt(variance + epsilon), with those along some axes.

    Args:
        x: Floats.
        axis: One or several; None is all.
        epsilon: Keeps the divisor from 0.

    Raises:
        UsageError: epsilon is not a positive number.
    """
    tensor = as_floats(x)
    if not as_number("the epsilon of a normalisation", epsilon) > 0:
        raise UsageError(f"{users_line()}: the epsilon of a normalisation is positive: {epsilon}")
    return apply(
        "normalize", tensor, axes=as_axes("normalize", tensor, axis), epsilon=float(epsilon)
    )


def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-5,
) -> Tensor:
    """Normalize each sample separately, then scale and shift.

    Source: Ba, Kiros and Hinton, "Layer normalization" (2016), section 3.

    Args:
        x: `(…, features)`.
        gamma: A factor of the result; broadcasts. None is 1.
        beta: Is added to it; broadcasts. None is 0.
        axis: Of the features.
        epsilon: As for `normalize`.
    """
    return _scaled(normalize(x, axis, epsilon), gamma, beta)


def group_norm(
    x: Any, groups: int, gamma: Any = None, beta: Any = None, epsilon: float = 1e-5
) -> Tensor:
    """Normalize groups of channels, each sample and group separately, then scale and shift.

    Source: Wu and He, "Group normalization" (ECCV 2018), section 3.

    Args:
        x: `(batch, …, channels)`.
        groups: How many; they divide the channels.
        gamma: The scales, `(channels,)`; None for none.
        beta: The shifts, `(channels,)`; None for none.
        epsilon: As for `normalize`.

    Raises:
        ShapeError: The groups do not divide the channels.
    """
    tensor = as_floats(x)
    (parts,) = as_shape("the groups of group_norm", (groups,), smallest=1)
    assert isinstance(parts, int)
    channels = tensor.shape[-1] if tensor.ndim > 1 else None
    if not isinstance(channels, int) or channels % parts:
        raise ShapeError(
            f"{users_line()}: group_norm of {show(tensor.shape)}: {parts} groups do not divide the "
            "channels of the last axis"
        )
    apart = reshaped(tensor, (*tensor.shape[:-1], parts, channels // parts))
    axes = (*range(1, apart.ndim - 2), apart.ndim - 1)
    return _scaled(reshaped(normalize(apart, axes, epsilon), tensor.shape), gamma, beta)


def _scaled(x: Tensor, gamma: Any, beta: Any) -> Tensor:
    scaled = x if gamma is None else x * gamma
    return scaled if beta is None else scaled + beta


def _moments(x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return x less its mean, and the variance."""
    centred = x - x.mean(axis=axes, keepdims=True)
    return centred, np.square(centred).mean(axis=axes, keepdims=True)


@through_float32
def _normalize(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    if not out.size:  # nothing has no mean
        return
    if attrs["axes"] == (out.ndim - 1,):
        _native.run_rows("normalize", out, inputs, [attrs["epsilon"]])
        return
    centred, variance = _moments(inputs[0], attrs["axes"])
    np.divide(centred, np.sqrt(variance + variance.dtype.type(attrs["epsilon"])), out=out)


@through_float32
def _gradient_kernel(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    dy, x, y = inputs
    axes = attrs["axes"]
    if not out.size:
        return
    if axes == (out.ndim - 1,):
        _native.run_rows("normalize_gradient", out, inputs, [attrs["epsilon"]])
        return
    _, variance = _moments(x, axes)
    along = np.mean(dy * y, axis=axes, keepdims=True)
    rest = dy - dy.mean(axis=axes, keepdims=True) - y * along
    np.divide(rest, np.sqrt(variance + variance.dtype.type(attrs["epsilon"])), out=out)


register(
    "normalize",
    same_spec,
    _normalize,
    lambda dy, y, x, attrs: [apply("normalize_gradient", dy, x[0], y, **attrs)],
)


def _second(u: Tensor, f: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    """Differentiate f = (dy - mean dy - y·mean(dy·y)) / deviation(x) by dy, x and y.

    The deviation's own derivative by x is y / n.
    """
    dy, of, y = x
    axes = attrs["axes"]

    def along(product: Tensor) -> Tensor:
        return mean(product, axes, keepdims=True)

    deviation = sqrt(var(of, axes, keepdims=True) + attrs["epsilon"])
    return [
        apply("normalize_gradient", u, of, y, **attrs),
        -(along(u * f) * y) / deviation,
        -(u * along(dy * y) + dy * along(u * y)) / deviation,
    ]


register("normalize_gradient", same_spec, _gradient_kernel, _second)
