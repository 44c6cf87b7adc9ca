"""Activation functions by name, and the layer that applies one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allreduce.errors import UsageError, unknown_name
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.nn.core.layer import Layer

Function = Callable[[Any], Tensor]


def linear(x: Any) -> Tensor:
    """Return the input as it is."""
    return as_tensor(x)


TABLE: Mapping[str, Function] = {
    "gelu": ops.gelu,
    "linear": linear,
    "relu": ops.relu,
    "sigmoid": ops.sigmoid,
    "softmax": ops.softmax,
    "tanh": ops.tanh,
}


def get(identifier: Any) -> Function:
    """Return an activation function by name; None is `linear`, a function is itself.

    Raises:
        UsageError: There is none of that name; the message lists those that exist.
    """
    if identifier is None:
        return linear
    if isinstance(identifier, str):
        if identifier not in TABLE:
            raise unknown_name("activation", identifier, TABLE)
        return TABLE[identifier]
    if callable(identifier):
        function: Function = identifier
        return function
    raise UsageError(f"an activation is a name or a function of one tensor, not {identifier!r}")


def name_of(function: Function) -> str:
    """Return the name by which `get` finds a function again.

    Raises:
        UsageError: It is not in the table, so a saved model could not name it.
    """
    for name, known in TABLE.items():
        if known is function:
            return name
    raise UsageError(
        f"the activation {getattr(function, '__name__', function)!r} has no name in the table, so "
        "it cannot be saved; put it into a Layer subclass and pass that to load_model as a custom "
        "object"
    )


class Activation(Layer):
    """Apply an activation function to every element (softmax: along the last axis).

    Args:
        activation: A name or a function.
        name: What summaries and errors call it.
        dtype: The dtype it computes in.
    """

    def __init__(
        self,
        activation: Any,
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.activation = get(activation)

    def call(self, inputs: Tensor) -> Tensor:
        return self.activation(inputs)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"activation": name_of(self.activation)}
