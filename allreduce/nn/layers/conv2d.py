"""Convolution over images."""

from __future__ import annotations

from typing import Any

from allreduce.devices.integers import integer, switch
from allreduce.errors import ShapeError
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.ops.array.windows import Pair, as_pair
from allreduce.graph.trace.variable import Variable
from allreduce.nn import activations, initializers
from allreduce.nn.core.checks import check_features, known_padding
from allreduce.nn.core.layer import Layer


class Conv2D(Layer):
    """Compute `activation(conv2d(inputs, kernel) + bias)` of images with their channels last.

    `(batch, height, width, channels)` becomes `(batch, windows, windows, filters)`.

    Args:
        filters: The channels of the outputs.
        kernel_size: An integer, or (height, width); and so are strides and dilation.
        strides: From one window to the next.
        padding: "valid": none, or "same": zeros, so that strides of 1 keep the images' size.
        dilation_rate: From one tap of the kernel to the next.
        groups: The number of groups of channels; each has its part of the filters.
        activation: A name or a function; None for none.
        use_bias: Whether to add a bias.
        kernel_initializer: The initial kernel, `(height, width, channels / groups, filters)`.
        bias_initializer: The initial bias, `(filters,)`.
    """

    one_tensor = True

    kernel: Variable
    bias: Variable

    def __init__(
        self,
        filters: int,
        kernel_size: int | Pair,
        strides: int | Pair = 1,
        padding: str = "valid",
        *,
        dilation_rate: int | Pair = 1,
        groups: int = 1,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: str = "glorot_uniform",
        bias_initializer: str = "zeros",
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.filters = integer("filters of Conv2D", filters, 1)
        self.groups = integer("groups of Conv2D", groups, 1)
        self.kernel_size = as_pair("the kernel_size of Conv2D", kernel_size)
        self.strides = as_pair("the strides of Conv2D", strides)
        self.dilation_rate = as_pair("the dilation_rate of Conv2D", dilation_rate)
        self.padding = known_padding("Conv2D", padding)
        self.activation = activations.get(activation)
        self.use_bias = switch("use_bias", use_bias)
        initializers.get(kernel_initializer)
        initializers.get(bias_initializer)
        self.kernel_initializer = kernel_initializer
        self.bias_initializer = bias_initializer

    def build(self, input_shape: Any) -> None:
        channels = input_shape[-1] if len(input_shape) == 4 else None
        if not isinstance(channels, int) or channels % self.groups or self.filters % self.groups:
            split = f"channels and its {self.filters} filters multiples of {self.groups} groups, "
            raise ShapeError(
                f"layer {self.path!r} (Conv2D) takes inputs of shape (batch, height, width, "
                f"channels), {split if self.groups > 1 else ''}but got {show(input_shape)}"
            )
        shape = (*self.kernel_size, channels // self.groups, self.filters)
        self.add_variable("kernel", shape, self.kernel_initializer)
        if self.use_bias:
            self.add_variable("bias", (self.filters,), self.bias_initializer)

    def call(self, inputs: Tensor) -> Tensor:
        check_features(self, inputs, self.kernel.shape[2] * self.groups)
        outputs = ops.conv2d(
            ops.cast(inputs, self.dtype),  # integers: images as they come
            self.kernel,
            self.strides,
            self.padding,
            self.dilation_rate,
            self.groups,
        )
        if self.use_bias:
            outputs = ops.add(outputs, self.bias)
        return self.activation(outputs)
