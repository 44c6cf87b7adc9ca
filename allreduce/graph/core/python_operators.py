"""Python's operators: the public functions of the same name, found by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allreduce.graph.core.numpy_calls import NumpyArgument

if TYPE_CHECKING:
    from allreduce.graph.core.tensor import Tensor

# The public functions are built out of tensors, so their module fills this table instead of being
# imported here.
OPERATORS: dict[str, Callable[..., Tensor]] = {}


def call(name: str, *inputs: Any) -> Tensor:
    """Apply the operator of this name."""
    return OPERATORS[name](*inputs)


class Operators(NumpyArgument):
    """Python's operators, for everything that can become a tensor."""

    __slots__ = ()

    def __add__(self, other: Any) -> Tensor:
        return call("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return call("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return call("subtract", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return call("subtract", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return call("multiply", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return call("multiply", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return call("divide", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return call("divide", other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return call("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return call("floor_divide", other, self)

    def __mod__(self, other: Any) -> Tensor:
        return call("remainder", self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return call("remainder", other, self)

    def __pow__(self, other: Any) -> Tensor:
        return call("power", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return call("power", other, self)

    def __neg__(self) -> Tensor:
        return call("negative", self)

    def __abs__(self) -> Tensor:
        return call("absolute", self)

    def __matmul__(self, other: Any) -> Tensor:
        return call("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return call("matmul", other, self)

    def __and__(self, other: Any) -> Tensor:
        return call("bitwise_and", self, other)

    def __rand__(self, other: Any) -> Tensor:
        return call("bitwise_and", other, self)

    def __or__(self, other: Any) -> Tensor:
        return call("bitwise_or", self, other)

    def __ror__(self, other: Any) -> Tensor:
        return call("bitwise_or", other, self)

    def __xor__(self, other: Any) -> Tensor:
        return call("bitwise_xor", self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return call("bitwise_xor", other, self)

    def __invert__(self) -> Tensor:
        return call("invert", self)

    def __getitem__(self, key: Any) -> Tensor:
        return call("getitem", self, key)

    def __lt__(self, other: Any) -> Tensor:
        return call("less", self, other)

    def __le__(self, other: Any) -> Tensor:
        return call("less_equal", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return call("greater", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return call("greater_equal", self, other)
