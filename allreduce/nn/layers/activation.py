"""An activation function as a layer."""

from __future__ import annotations

from typing import Any

from allreduce.graph.core.tensor import Tensor
from allreduce.nn import activations
from allreduce.nn.core.layer import Layer


class Activation(Layer):
    """Apply an activation function to every element (softmax: along the last axis).

    Args:
        activation: A name or a function.
    """

    one_tensor = True

    def __init__(
        self,
        activation: Any,
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.activation = activations.get(activation)

    def call(self, inputs: Tensor) -> Tensor:
        return self.activation(inputs)
