"""Layers that join several inputs, as functional models need them."""

from __future__ import annotations

from functools import reduce
from typing import Any

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.nn.core.layer import Layer


class Add(Layer):
    """The sum of several inputs of one shape: `Add()([a, b])`."""

    def call(self, inputs: Any) -> Tensor:
        parts = _several(self, inputs)
        if len({part.shape for part in parts}) > 1:
            shapes = " and ".join(show(part.shape) for part in parts)
            raise ShapeError(
                f"{users_line()}: layer {self.path or self.name!r} takes inputs of one shape, but "
                f"got {shapes}"
            )
        return reduce(ops.add, parts)


class Concatenate(Layer):
    """Several inputs side by side: `Concatenate()([a, b])`.

    Args:
        axis: The axis along which they may differ; not the batch.
    """

    def __init__(
        self,
        axis: int = -1,
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        if isinstance(axis, bool) or not isinstance(axis, int) or axis == 0:
            raise UsageError(f"Concatenate takes an axis other than the batch's, 0: {axis!r}")
        self.axis = axis

    def call(self, inputs: Any) -> Tensor:
        parts = _several(self, inputs)
        try:
            return ops.concatenate(parts, axis=self.axis)
        except ShapeError as error:
            raise ShapeError(f"layer {self.path or self.name!r}: {error}") from None


def _several(layer: Layer, inputs: Any) -> list[Tensor]:
    if not isinstance(inputs, list | tuple) or len(inputs) < 2:
        raise UsageError(
            f"{users_line()}: layer {layer.path or layer.name!r} takes a list of at least two "
            f"inputs: {type(layer).__name__}()([a, b])"
        )
    return list(inputs)
