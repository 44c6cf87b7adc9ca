"""Variables: state that persists between steps, with one copy per replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import numpy as np

from allreduce.devices import DeviceName, as_array, lookup, owner, read, write
from allreduce.devices.integers import switch
from allreduce.errors import ShapeError, UsageError, raised_here
from allreduce.graph.core.naming import unique_name
from allreduce.graph.core.node import Node
from allreduce.graph.core.scope import SameDeviceAs, choose, users_line, within
from allreduce.graph.core.spec import Spec, show
from allreduce.graph.core.tensor import ConcreteTensor, Operators, Tensor, TracedTensor, call
from allreduce.graph.placement.device_map import DeviceMap
from allreduce.graph.placement.placement import check_exists
from allreduce.graph.trace.dispatch import apply, as_tensor, current_place
from allreduce.graph.trace.trace import current_trace
from allreduce.keywords import explain

_DTYPES = (
    *("float64", "float32", "float16", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


class Owner(Protocol):
    """The interface through which a variable reaches its replicas."""

    @property
    def local_replicas(self) -> int: ...

    @property
    def places(self) -> list[DeviceMap]: ...

    def note_assignment(self, variable: Variable, value: np.ndarray) -> None: ...


class Variable(Operators):
    """An array that steps read and change; every replica has an equal copy.

    Args:
        initial: The initial value, or a function without arguments that returns it.
        name: Its path, "model/0/kernel", for errors and saved files; by default "variable", with a
            number.
        trainable: Whether optimizers change it.
    """

    @explain()
    def __init__(
        self,
        initial: Any,
        *,
        name: str | None = None,
        trainable: bool = True,
        replicator: Owner | None = None,
    ) -> None:
        maker: Callable[[], Any] = initial if callable(initial) else lambda: initial
        if name is None:
            name = unique_name("variable")
        elif not isinstance(name, str) or not name:
            raise UsageError(f"a variable's name is text, not {name!r}")
        trainable = switch(f"trainable of variable {name!r}", trainable)
        made = maker()
        try:
            value = np.asarray(made if owner(made) is None else read(as_array(made)), order="C")
        except ValueError as error:  # such as lists of several lengths
            if not raised_here(error):
                raise
            raise UsageError(f"variable {name!r}: {error}") from None
        if value.dtype.name not in _DTYPES:
            raise UsageError(
                f"variable {name!r} cannot hold {value.dtype}; there are {', '.join(_DTYPES)}"
            )
        self.name = name
        self.trainable = trainable
        self.home: object | None = None  # the device, or whose arena the storage is a view of
        self.replicator = _current_owner() if replicator is None else replicator
        self.spec = Spec(np.shape(value), value.dtype)
        # The device that the scopes ask for; None for its replica's first device.
        asked = {"name": name, "trainable": trainable}
        self.device = choose(Node(0, "variable", (), asked, self.spec)).device
        # Its value on the task of a cluster that holds it, which is created from this one; None
        # for a variable of this process.
        self.initial: np.ndarray | None = None
        if self.device is not None and _is_remote(self.device, self.replicator.places[0]):
            self.initial, self.storage = value, []
            return
        if self.device is not None:
            check_exists(f"variable {name!r}", self.device, self.replicator.places[0])
        # One array per local replica. The first step moves them to their devices, and the first
        # trace of an optimizer into its arena.
        self.storage = [value.copy() for _ in range(self.replicator.local_replicas)]

    @property
    def shape(self) -> tuple[int, ...]:
        return cast(tuple[int, ...], self.spec.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.spec.dtype

    @property
    def has_value(self) -> bool:
        """Whether its value is the one that this very step has."""
        trace = current_trace()
        return trace is None or trace.has_values

    @property
    def place(self) -> DeviceName:
        """The device where steps read and change it; all fields are open for the replica's own."""
        return self.device or DeviceName()

    def numpy(self) -> np.ndarray:
        """Copy this process's first replica's value.

        Raises:
            UsageError: A task of a cluster holds the variable.
        """
        return read(self._local("session.read(variable) returns its value"))

    def _local(self, instead: str) -> np.ndarray:
        """Return the first replica's value."""
        if self.initial is not None:
            raise UsageError(
                f"{users_line()}: variable {self.name!r} is held by {self.device}, not by this "
                f"process; {instead}"
            )
        return self.storage[0]

    def __float__(self) -> float:
        return float(self.__tensor__())

    def __int__(self) -> int:
        return int(self.__tensor__())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} has no axes, so no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.__tensor__())

    def __bool__(self) -> bool:
        return bool(self.__tensor__())

    # Variables compare by identity, so that `in` and dicts work; other operands are compared with
    # the value.
    def __eq__(self, other: object) -> Any:
        return self is other if _is_no_value(other) else call("equal", self, other)

    def __ne__(self, other: object) -> Any:
        return self is not other if _is_no_value(other) else call("not_equal", self, other)

    __hash__ = object.__hash__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        local = self._local("session.read(variable) returns its value")
        return np.array(read(local), dtype=dtype)

    def __tensor__(self) -> Tensor:
        trace = current_trace()
        if trace is None:
            # A copy, because steps change the variable where it lies.
            value = read(self._local("run a function that reads it with session.run"))
            return ConcreteTensor(value, self.device or current_place("read", value))
        return trace.read(self, self.spec, {"variable": self}, self.place)

    def settle(self, device: DeviceName) -> None:
        """Move to the device where steps use the variable, if it is elsewhere.

        Args:
            device: The device's name in the replicas' program.

        Raises:
            OutOfMemoryError: The device has too little memory.
        """
        if self.home is not None:
            return
        for index, places in enumerate(self.replicator.places):
            value = self.storage[index]
            contents = [(value.nbytes, f"{self.spec} of variable {self.name!r}")]
            buffer = lookup(places.names[device]).allocate(value.nbytes, contents)
            array = buffer.array(value.dtype, value.shape)
            write(array, value)
            self.storage[index] = array  # whole, whatever interrupts it here
        self.home = device

    @explain()
    def assign(self, value: Any) -> None:
        """Change the value on every local replica; inside `ar.function`, in each step.

        Every rank must do so, with equal values; otherwise the next step raises a MismatchError.

        Raises:
            ShapeError: The value's shape is not the variable's.
            UsageError: The value's type does not fit, such as a float for an integer variable.
        """
        weak = isinstance(value, int | float) and not isinstance(value, bool)
        tensor = as_tensor(value, self.dtype if weak else None)
        if tensor.shape != self.spec.shape:
            raise ShapeError(
                f"{users_line()}: variable {self.name!r} has shape {show(self.spec.shape)}; "
                f"a value of shape {show(tensor.shape)} cannot be assigned to it"
            )
        if not np.can_cast(tensor.dtype, self.dtype, "same_kind"):
            raise UsageError(
                f"{users_line()}: variable {self.name!r} is {self.dtype}; a {tensor.dtype} value "
                "would lose its kind of number: cast it before assigning it"
            )
        if tensor.dtype != self.dtype:
            tensor = apply("cast", tensor, dtype=self.dtype)
        trace = current_trace()
        if isinstance(tensor, TracedTensor) and trace is not None:
            trace.effect("assign", [tensor], {"variable": self}, [self], self.place)
            return
        assert isinstance(tensor, ConcreteTensor)
        self._local("session.assign(variable, value) sets its value")
        self.replicator.note_assignment(self, tensor.value)
        for array in self.storage:
            write(array, tensor.value)

    def __repr__(self) -> str:
        return f"<variable {self.name!r} {self.spec}>"


@explain()
def colocate_with(value: Tensor | Variable) -> AbstractContextManager[None]:
    """Place the operators that the block calls on the device of a tensor or a variable.

    It takes the place of the `ar.device` scopes around it; one inside of it wins.

    Raises:
        UsageError: It is neither, or a tensor of another traced function.
    """
    if not isinstance(value, Tensor | Variable):
        raise UsageError(
            f"{users_line()}: colocate_with takes a tensor or a variable, not {value!r:.60}"
        )
    tensor = value.__tensor__() if isinstance(value, Variable) else value
    if isinstance(tensor, TracedTensor):
        if tensor.trace is not current_trace():
            raise UsageError(
                f"{users_line()}: colocate_with got a tensor of another traced function, or of one "
                "whose trace has ended"
            )
        return within(SameDeviceAs(id(tensor.trace), tensor.id))
    assert isinstance(tensor, ConcreteTensor)
    return within(tensor.device)


def _is_remote(asked: DeviceName, places: DeviceMap) -> bool:
    """Return whether a device's name has a job, and is of another task than this process's."""
    return asked.job is not None and not any(map(asked.matches, places.names))


def _is_no_value(other: object) -> bool:
    return other is None or isinstance(other, Variable)


_owner: Callable[[], Owner] | None = None


def set_owner_source(source: Callable[[], Owner]) -> None:
    """Set the function that finds the replicas of new variables (the current scope)."""
    global _owner
    _owner = source


def _current_owner() -> Owner:
    assert _owner is not None, "allreduce.graph is imported as a whole"
    return _owner()
