"""Tensors and their Python operators: traced inside `ar.function`, with values outside."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.graph.core.host_future import HostFuture, Output
from allreduce.graph.core.numpy_calls import NumpyArgument
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Dim, Shape, Spec, show
from allreduce.keywords import explain

# The operators for the methods of NumPy's arrays.
METHODS: dict[str, str] = {}
# Attributes of other libraries' tensors and variables, and what does the same.
_VALUE = "x.numpy() copies the value; in a step use the variable itself"
_ELSEWHERE = {
    "assign_add": "use variable.assign(variable + value)",
    "assign_sub": "use variable.assign(variable - value)",
    "backward": "optimizer.minimize(loss, variables) or ar.gradients differentiates it",
    "data": _VALUE,
    "grad": "ar.gradients(loss, variables) returns the gradients, inside an ar.function",
    "item": "float(x) and int(x) return a scalar's value",
    "read_value": _VALUE,
    "value": _VALUE,
}
# Python's operators by name. `ops/functions.py`, which needs tensors, fills this table.
OPERATORS: dict[str, Callable[..., Tensor]] = {}


def call(name: str, *inputs: Any) -> Tensor:
    """Apply the operator of this name."""
    return OPERATORS[name](*inputs)


def _unary(name: str) -> Callable[[Any], Tensor]:
    return explain()(lambda self: call(name, self))


def _binary(name: str) -> Callable[[Any, Any], Tensor]:
    return explain()(lambda self, other: call(name, self, other))


def _reflected(name: str) -> Callable[[Any, Any], Tensor]:
    return explain()(lambda self, other: call(name, other, self))


class Operators(NumpyArgument):
    """Python's operators for tensors and variables; each calls the public function of its name."""

    __slots__ = ()

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("subtract"), _reflected("subtract")
    __mul__, __rmul__ = _binary("multiply"), _reflected("multiply")
    __truediv__, __rtruediv__ = _binary("divide"), _reflected("divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _reflected("floor_divide")
    __mod__, __rmod__ = _binary("remainder"), _reflected("remainder")
    __pow__, __rpow__ = _binary("power"), _reflected("power")
    __matmul__, __rmatmul__ = _binary("matmul"), _reflected("matmul")
    __and__, __rand__ = _binary("bitwise_and"), _reflected("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or"), _reflected("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor"), _reflected("bitwise_xor")
    __neg__ = _unary("negative")
    __abs__ = _unary("absolute")
    __invert__ = _unary("invert")
    __getitem__ = _binary("getitem")
    __lt__ = _binary("less")
    __le__ = _binary("less_equal")
    __gt__ = _binary("greater")
    __ge__ = _binary("greater_equal")

    if not TYPE_CHECKING:  # else type checkers would allow assignments, and every attribute

        def __setitem__(self, index: Any, value: Any) -> NoReturn:
            raise UsageError(
                f"{users_line()}: no element can be set; variable.assign(value) changes a whole "
                "variable, and ar.ops.where makes a tensor with other elements"
            )

        def __getattr__(self, name: str) -> NoReturn:
            method = f"use ar.ops.{METHODS[name]}(x)" if name in METHODS else ""
            hint = _ELSEWHERE.get(name, method)
            kind = "tensor" if isinstance(self, Tensor) else "variable"
            text = f"a {kind} has no attribute {name!r}" + (f"; {hint}" if hint else "")
            # Without a name a traceback adds no suggestion of its own.
            raise AttributeError(text, name="" if hint else name, obj=self)


class Tensor(Operators):
    """The type that operators take and return."""

    __slots__ = ("__weakref__", "spec")

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @property
    def shape(self) -> Shape:
        """The sizes; the batch size is a named dimension."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        return self.spec.ndim

    def numpy(self) -> np.ndarray:
        """Copy the value into a new array; traced tensors have none."""
        self._has_no_value("an array", "return it from the function")

    def __bool__(self) -> bool:
        self._has_no_value("a bool", "use ar.ops.where, or decide on Python values")

    def __float__(self) -> float:
        self._has_no_value("a float", "return it from the function")

    def __int__(self) -> int:
        self._has_no_value("an int", "return it from the function")

    def __index__(self) -> int:
        self._has_no_value("an index or a size", "use ar.ops, or Python's numbers")

    def __round__(self, digits: int | None = None) -> int | float:
        self._has_no_value("a number", "return it from the function")

    def __format__(self, how: str) -> str:
        if how:
            self._has_no_value("a number to be written", "ar.print prints it when the step runs")
        return str(self)

    def __len__(self) -> int:
        if not self.shape:
            raise UsageError(f"a scalar has no len() ({users_line()})")
        size = self.shape[0]
        if isinstance(size, Dim):
            self._has_no_value("a length", "the batch size is known only when the step runs")
        return size

    def _has_no_value(self, wanted: str, remedy: str) -> NoReturn:
        raise UsageError(
            f"{users_line()}: a tensor of shape {show(self.shape)} was used as {wanted} inside "
            f"ar.function, where it has no value yet; {remedy}"
        )

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return call("equal", self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return call("not_equal", self, other)

    __hash__ = object.__hash__


class TracedTensor(Tensor):
    """A value of the step being traced: it has a shape and a dtype but no elements yet."""

    __slots__ = ("id", "trace")

    has_value = False

    def __init__(self, trace: object, id: int, spec: Spec) -> None:
        super().__init__(spec)
        self.trace = trace
        self.id = id

    def __repr__(self) -> str:
        return f"<tensor %{self.id} {self.spec}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._has_no_value("an array", "use ar.ops instead of numpy here, or return it")


class _Valued:
    """Methods of tensors with a value."""

    __slots__ = ()

    _value: np.ndarray

    def numpy(self) -> np.ndarray:
        """Copy the value into a new array."""
        return self._value.copy()

    @property
    def value(self) -> np.ndarray:
        """The value itself, read-only by convention."""
        return self._value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._value, dtype=dtype, copy=True if copy is None else copy)

    def __bool__(self) -> bool:
        return bool(self._value.item())

    def __float__(self) -> float:
        return float(self._value.item())

    def __int__(self) -> int:
        return int(self._value.item())

    def __index__(self) -> int:
        return operator.index(self._value)

    def __round__(self, digits: int | None = None) -> int | float:
        number: int | float = round(self._value.item(), digits)
        return number

    def __format__(self, how: str) -> str:
        return format(self._value[()], how) if how else str(self)

    def __len__(self) -> int:
        return len(self._value)


# Steps return the same shapes again and again.
_spec = lru_cache(1024)(Spec)


class ConcreteTensor(_Valued, Tensor):
    """A value on a device, outside of a trace."""

    __slots__ = ("_value", "device")

    def __init__(self, value: np.ndarray, device: DeviceName) -> None:
        self.spec = _spec(value.shape, value.dtype)
        self._value = value
        self.device = device

    def __repr__(self) -> str:
        return f"<tensor {self.spec} on {self.device}: {self._value}>"


class _PendingTensor(ConcreteTensor):
    """A value that a device copies to the host; reading it waits for the copy."""

    __slots__ = ("_coming",)

    def __init__(self, coming: HostFuture, device: DeviceName) -> None:
        Tensor.__init__(self, Spec(coming.shape, coming.dtype))
        self._coming = coming
        self.device = device

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # of an unset attribute
            if name != "_value":
                return super().__getattr__(name)
            self._value = self._coming.wait()
            return self._value


def concrete(output: Output, device: DeviceName) -> ConcreteTensor:
    """Wrap a step's output in a tensor."""
    if isinstance(output, HostFuture):
        return _PendingTensor(output, device)
    return ConcreteTensor(output, device)


class EagerTensor(_Valued, TracedTensor):
    """A value of an eager step: recorded like a traced one, and computed at once.

    Its shape has the same named sizes as in a trace; its value has the batch's.
    """

    __slots__ = ("_value",)

    has_value = True

    def __init__(self, trace: object, id: int, spec: Spec, value: np.ndarray) -> None:
        super().__init__(trace, id, spec)
        self._value = value

    def __repr__(self) -> str:
        return f"<tensor %{self.id} {self.spec}: {self._value}>"
