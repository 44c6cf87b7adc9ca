"""Pooling of images with their channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from allreduce.devices.integers import switch
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.ops.array.windows import Pair, as_pair
from allreduce.nn.core.checks import known_padding
from allreduce.nn.core.layer import Layer


class _Pooling(Layer):
    """Give one value per window: `(batch, height, width, channels)` to `(batch, …, channels)`.

    Args:
        pool_size: Of the windows, an integer or (height, width).
        strides: The distance between windows; by default their size.
        padding: "valid": only whole windows, or "same": also windows over the edge.
    """

    one_tensor = True

    operator: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        pool_size: int | Pair = 2,
        strides: int | Pair | None = None,
        padding: str = "valid",
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        kind = type(self).__name__
        self.pool_size = as_pair(f"the pool_size of {kind}", pool_size)
        self.strides = as_pair(
            f"the strides of {kind}", self.pool_size if strides is None else strides
        )
        self.padding = known_padding(kind, padding)

    def call(self, inputs: Tensor) -> Tensor:
        images = ops.cast(inputs, self.dtype)
        return type(self).operator(images, self.pool_size, self.strides, self.padding)


class MaxPool2D(_Pooling):
    __doc__ = f"Take the largest of each window.\n\n    {_Pooling.__doc__}"
    operator = staticmethod(ops.max_pool2d)


class AveragePooling2D(_Pooling):
    __doc__ = f"Average each window, without what is over the edge.\n\n    {_Pooling.__doc__}"
    operator = staticmethod(ops.average_pool2d)


class GlobalAveragePooling2D(Layer):
    """Average over height and width: `(batch, height, width, channels)` to `(batch, channels)`.

    Args:
        keepdims: Whether the result is `(batch, 1, 1, channels)`.
    """

    one_tensor = True

    def __init__(
        self,
        keepdims: bool = False,
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.keepdims = switch("keepdims", keepdims)

    def call(self, inputs: Tensor) -> Tensor:
        return ops.global_average_pool2d(ops.cast(inputs, self.dtype), self.keepdims)
