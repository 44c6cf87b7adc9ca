"""Recording: `apply` appends a node inside `ar.function`, and runs the kernel outside of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from allreduce.devices import logical_devices, options
from allreduce.devices.names import DeviceName
from allreduce.errors import ShapeError, UnsupportedError, UsageError
from allreduce.graph import numerics, seed
from allreduce.graph.node import Graph, Node
from allreduce.graph.ops.base import Attrs, Op, located, lookup
from allreduce.graph.placement import requested
from allreduce.graph.scope import choose, current_part, surroundings, users_line
from allreduce.graph.spec import Dim, Spec, concrete
from allreduce.graph.tensor import ConcreteTensor, EagerTensor, Tensor, TracedTensor

HOST = DeviceName.parse("CPU:0").complete()


class Trace:
    """One replica's program while it is being recorded."""

    has_values: ClassVar[bool] = False  # whether it is carried out meanwhile

    def __init__(self, replicas: int = 1) -> None:
        self.replicas = replicas  # that run it together
        self.nodes: list[Node] = []
        self.inputs: list[int] = []
        self.effects: list[int] = []
        self.has_batch = False
        self._current: dict[Hashable, TracedTensor] = {}
        self._reads: dict[Hashable, list[TracedTensor]] = {}
        self._runtime: dict[str, TracedTensor] = {}
        self._draws = itertools.count()

    def add(
        self,
        op: str,
        inputs: Sequence[TracedTensor],
        attrs: Attrs,
        spec: Spec,
        *,
        control: Sequence[int] = (),
        place: DeviceName | None = None,
    ) -> TracedTensor:
        """Append a node where the scopes around the caller ask for it; `place` wins over them."""
        return self.tensor(self._append(op, inputs, attrs, spec, control, place).id)

    def tensor(self, id: int) -> TracedTensor:
        """Return the value of a node."""
        return TracedTensor(self, id, self.nodes[id].spec)

    def _append(
        self,
        op: str,
        inputs: Sequence[TracedTensor],
        attrs: Attrs,
        spec: Spec,
        control: Sequence[int],
        place: DeviceName | None,
    ) -> Node:
        own = tuple(self.own(tensor, op).id for tensor in inputs)
        node = Node(
            id=len(self.nodes),
            op=op,
            inputs=own,
            attrs=attrs,
            spec=spec,
            device=place,
            control=tuple(control),
            source=users_line(),
            part=current_part(),
        )
        node = choose(node, self) if place is None else node
        self.nodes.append(node)
        return node

    def own(self, tensor: TracedTensor, what: str) -> TracedTensor:
        """Return the tensor of this trace that stands for one that `what` got.

        Raises:
            UsageError: It belongs to another traced function.
        """
        if tensor.trace is not self:
            raise UsageError(
                f"{users_line()}: {what} got a tensor that was made in another traced function; "
                "return it from there and pass it in as an argument"
            )
        return tensor

    def placeholder(self, spec: Spec, name: str, *, varies: bool = False) -> TracedTensor:
        """Append a value that is fed anew in every step; `varies` where replicas get their own."""
        self.has_batch |= any(not isinstance(size, int) for size in spec.shape)
        tensor = self.add("placeholder", (), {"name": name, "varies": varies}, spec)
        self.inputs.append(tensor.id)
        return tensor

    def runtime(self, name: str) -> TracedTensor:
        """Return what the executor tells a step, an int64: a field of `Moment`, or `replica`."""
        if name not in self._runtime:
            spec = Spec((), np.dtype(np.int64))
            self._runtime[name] = self.add("runtime", (), {"name": name}, spec)
        return self._runtime[name]

    def next_draw(self) -> int:
        """Number the random operators in the order in which they are recorded."""
        return next(self._draws)

    def read(self, key: Hashable, spec: Spec, attrs: Attrs, place: DeviceName) -> TracedTensor:
        """Return the current value of a variable: one node until the variable is next changed.

        It is read where the variable is, whatever the scopes around the caller ask for.
        """
        if key not in self._current:
            after = [e for e in self.effects if key in self.nodes[e].attrs["changes"]]
            tensor = self.add("read", (), attrs, spec, control=after[-1:], place=place)
            self._current[key] = tensor
            self._reads.setdefault(key, []).append(tensor)
        return self._current[key]

    def reads(self, key: Hashable) -> tuple[TracedTensor, ...]:
        """List every value of a variable that was read so far, also before it was changed."""
        return tuple(self._reads.get(key, ()))

    def effect(
        self,
        op: str,
        inputs: Sequence[TracedTensor],
        attrs: Attrs,
        changes: Sequence[Hashable],
        place: DeviceName | None = None,
    ) -> TracedTensor:
        """Append a node that changes the variables `changes`; effects stay in this order."""
        spec = Spec((), np.dtype(np.int64))
        attrs = {**attrs, "changes": tuple(changes)}
        node = self.add(op, inputs, attrs, spec, control=self.effects[-1:], place=place)
        self.effects.append(node.id)
        for key in changes:
            self._current.pop(key, None)
        return node

    def finish(self, outputs: Sequence[TracedTensor]) -> Graph:
        """Close the recording."""
        return Graph(
            tuple(self.nodes),
            tuple(self.inputs),
            tuple(tensor.id for tensor in outputs),
            tuple(self.effects),
        )


class _Recording(threading.local):
    trace: Trace | None = None


_here = _Recording()


def current_trace() -> Trace | None:
    """Return the trace that this thread records operators into; None outside of functions."""
    return _here.trace


@contextmanager
def recording(trace: Trace) -> Iterator[Trace]:
    """Record the operators that the block calls on this thread into `trace`."""
    outer, _here.trace = _here.trace, trace
    try:
        yield trace
    finally:
        _here.trace = outer


def check_outside(what: str, instead: str) -> None:
    """Refuse a call inside of a step.

    Raises:
        UsageError: There is one; says what to do instead.
    """
    if current_trace() is not None:
        raise UsageError(f"{users_line()}: {what} was called inside a step; {instead}")


def as_tensor(value: Any, dtype: Any = None) -> Tensor:
    """Make a tensor of what an operator takes: a tensor, variable, array, number or nested list.

    Raises:
        UsageError: The value is nothing that has elements of one number type.
    """
    if isinstance(value, ConcreteTensor):
        return value if current_trace() is None else _constant(value.value)
    if isinstance(value, EagerTensor) and value.trace is not current_trace():
        return _constant(value.value)  # kept from a step that has ended
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__tensor__"):
        result = value.__tensor__()
        assert isinstance(result, Tensor)
        return result
    if isinstance(value, Dim):
        raise UsageError(
            f"{users_line()}: the size {value} is known only when the step runs; "
            "ar.ops.size(x, axis) gives it as a tensor"
        )
    array = np.asarray(value, dtype=dtype)
    if array.dtype == object or array.dtype.kind in "USOMm":
        raise UsageError(
            f"{users_line()}: cannot make a tensor of {type(value).__name__} {value!r:.60}"
        )
    return _constant(array)


def _constant(array: np.ndarray) -> Tensor:
    trace = current_trace()
    if trace is None:
        return ConcreteTensor(array, current_place("constant", array))
    # A copy, because the caller may change the array after tracing.
    value = array.copy()
    return trace.add("constant", (), {"value": value}, Spec(value.shape, value.dtype))


def current_place(op: str, value: np.ndarray) -> DeviceName:
    """Return where an operator outside of functions gives its value."""
    if not surroundings():
        return HOST
    node = choose(Node(0, op, (), {}, Spec(value.shape, value.dtype), source=users_line()))
    if node.device is None:
        return HOST
    available = [device.name for device in logical_devices()]
    return requested(node, node.device, HOST, available)[0]


def apply(name: str, *inputs: Any, **attrs: Any) -> Tensor:
    """Record one operator, or run it at once outside of functions.

    Raises:
        ShapeError: The inputs do not fit the operator; the message has the user's line.
    """
    op = lookup(name)
    tensors = [as_tensor(value) for value in inputs]
    try:
        spec = op.shape([tensor.spec for tensor in tensors], attrs)
    except ShapeError as error:
        raise ShapeError(f"{users_line()}: {name}: {error}") from None
    trace = current_trace()
    if trace is None:
        return _run_now(op, [_concrete(tensor, name) for tensor in tensors], attrs, spec)
    return trace.add(name, [_traced(tensor) for tensor in tensors], attrs, spec)


def _traced(tensor: Tensor) -> TracedTensor:
    assert isinstance(tensor, TracedTensor)
    return tensor


def _concrete(tensor: Tensor, name: str) -> ConcreteTensor:
    if isinstance(tensor, ConcreteTensor):
        return tensor
    raise UsageError(
        f"{users_line()}: {name} got a tensor of a traced function after its trace had ended; "
        "return the tensor from the function instead of keeping it"
    )


def _run_now(op: Op, inputs: Sequence[ConcreteTensor], attrs: Attrs, spec: Spec) -> ConcreteTensor:
    if op.view is not None:
        value = op.view(inputs[0].value, attrs)
        return ConcreteTensor(value, current_place(op.name, value))
    if op.cpu is None:
        raise UnsupportedError(f"{users_line()}: {op.name} works inside ar.function only")
    out = np.empty(concrete(spec.shape, 0), spec.dtype)
    with np.errstate(all="ignore"):
        try:
            op.cpu(out, [tensor.value for tensor in inputs], attrs)
        except UsageError as error:
            raise located(error, op.name, users_line(), current_part()) from None
    if options.current().check_numerics:
        values = [tensor.value for tensor in inputs]
        numerics.check(op.name, users_line(), out, values, "outside of steps")
    return ConcreteTensor(out, current_place(op.name, out))


_eager_draws = itertools.count()
_drawn_since = 0


def runtime(name: str) -> Tensor:
    """Return what the executor tells a step; outside of functions, one replica at row 0."""
    trace = current_trace()
    if trace is not None:
        return trace.runtime(name)
    value = np.asarray(0, np.int64)
    return ConcreteTensor(value, current_place("runtime", value))


def next_draw() -> int:
    """Number a random operator: by place in the trace, by call since `set_seed` outside of it."""
    global _eager_draws, _drawn_since
    trace = current_trace()
    if trace is not None:
        return trace.next_draw()
    if _drawn_since != seed.times_set():
        _drawn_since, _eager_draws = seed.times_set(), itertools.count()
    return next(_eager_draws)
