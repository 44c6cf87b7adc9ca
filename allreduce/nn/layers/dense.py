"""The fully connected layer."""

from __future__ import annotations

from typing import Any

from allreduce.devices.integers import integer, switch
from allreduce.errors import ShapeError
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.variable import Variable
from allreduce.nn import activations, initializers
from allreduce.nn.core.checks import check_features
from allreduce.nn.core.layer import Layer


class Dense(Layer):
    """Compute `activation(inputs @ kernel + bias)`: `(batch, …, features)` to `(batch, …, units)`.

    Args:
        units: The size of the last axis of the outputs.
        activation: A name or a function; None for none.
        use_bias: Whether to add a bias.
        kernel_initializer: The initial kernel, `(features, units)`.
        bias_initializer: The initial bias, `(units,)`.
    """

    one_tensor = True

    kernel: Variable
    bias: Variable

    def __init__(
        self,
        units: int,
        activation: Any = None,
        *,
        use_bias: bool = True,
        kernel_initializer: str = "glorot_uniform",
        bias_initializer: str = "zeros",
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.units = integer("units of Dense", units, 1)
        self.activation = activations.get(activation)
        self.use_bias = switch("use_bias", use_bias)
        initializers.get(kernel_initializer)
        initializers.get(bias_initializer)
        self.kernel_initializer = kernel_initializer
        self.bias_initializer = bias_initializer

    def build(self, input_shape: Any) -> None:
        features = input_shape[-1] if input_shape else None
        if len(input_shape) < 2 or not isinstance(features, int):
            raise ShapeError(
                f"layer {self.path!r} (Dense) takes inputs of shape (batch, …, features), but got "
                f"{show(input_shape)}"
            )
        self.add_variable("kernel", (features, self.units), self.kernel_initializer)
        if self.use_bias:
            self.add_variable("bias", (self.units,), self.bias_initializer)

    def call(self, inputs: Tensor) -> Tensor:
        check_features(self, inputs, self.kernel.shape[0])
        if inputs.dtype != self.dtype:  # integers: images as they come
            inputs = ops.cast(inputs, self.dtype)
        outputs = ops.matmul(inputs, self.kernel)
        if self.use_bias:
            outputs = ops.add(outputs, self.bias)
        return self.activation(outputs)
