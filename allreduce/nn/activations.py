"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allreduce.errors import UsageError, unknown_name
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor

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
    """Return the name by which `get` finds a function again."""
    for name, known in TABLE.items():
        if known is function:
            return name
    raise UsageError(
        f"the activation {getattr(function, '__name__', function)!r} has no name in the table, so "
        "it cannot be saved; put it into a Layer subclass and pass that to load_model as a custom "
        "object"
    )
