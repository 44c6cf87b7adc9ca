"""Tracing: record one replica's program node by node."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.core.op_table import Attrs
from allreduce.graph.core.scope import choose, current_part, users_line
from allreduce.graph.core.spec import Spec
from allreduce.graph.core.tensor import Tensor, TracedTensor

HOST = DeviceName.parse("CPU:0").complete()


class Trace:
    """One replica's program while it is recorded."""

    has_values: ClassVar[bool] = False  # whether it is carried out meanwhile

    def __init__(self, replicas: int = 1) -> None:
        self.replicas = replicas  # that run it together
        self.nodes: list[Node] = []
        self.inputs: list[int] = []
        self.effects: list[int] = []
        self.has_batch = False
        self._current: dict[Hashable, TracedTensor] = {}
        self._changed: dict[Hashable, tuple[int, ...]] = {}  # by which effect last
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
        own = tuple(self.own(tensor, op).id for tensor in inputs)  # may append nodes, too
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
        self._record(choose(node, self) if place is None else node)
        return self.tensor(node.id)

    def _record(self, node: Node) -> None:
        self.nodes.append(node)

    def tensor(self, id: int) -> TracedTensor:
        """Return the value of a node."""
        return TracedTensor(self, id, self.nodes[id].spec)

    def own(self, tensor: TracedTensor, what: str) -> TracedTensor:
        """Return this trace's tensor for an argument of `what`."""
        if tensor.trace is not self:
            raise UsageError(
                f"{users_line()}: {what} got a tensor that was made in another traced function; "
                "return it from there and pass it in as an argument"
            )
        return tensor

    def placeholder(self, spec: Spec, name: str, *, varies: bool = False) -> TracedTensor:
        """Append an input of the step; `varies` if each replica gets its own."""
        self.has_batch |= any(not isinstance(size, int) for size in spec.shape)
        tensor = self.add("placeholder", (), {"name": name, "varies": varies}, spec)
        self.inputs.append(tensor.id)
        return tensor

    def runtime(self, name: str) -> TracedTensor:
        """Return a number that changes per step, int64: a field of `StepInfo`, or `replica`."""
        if name not in self._runtime:
            spec = Spec((), np.dtype(np.int64))
            self._runtime[name] = self.add("runtime", (), {"name": name}, spec)
        return self._runtime[name]

    def next_draw(self) -> int:
        """Number the random operators in the order in which they are recorded."""
        return next(self._draws)

    def read(self, key: Hashable, spec: Spec, attrs: Attrs, place: DeviceName) -> TracedTensor:
        """Return the value of a variable: one node until the variable is changed.

        It is read on the device of the variable, whatever the scopes ask for.
        """
        if key not in self._current:
            after = self._changed.get(key, ())
            tensor = self.add("read", (), attrs, spec, control=after, place=place)
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
            self._changed[key] = (node.id,)
        return node

    def finish(self, outputs: Sequence[TracedTensor]) -> Graph:
        """Finish recording; returns the graph."""
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
    """Return the trace that records operators of this thread; None outside of functions."""
    return _here.trace


@contextmanager
def recording(trace: Trace) -> Iterator[Trace]:
    """Record the operators that the block calls on this thread in `trace`."""
    outer, _here.trace = _here.trace, trace
    try:
        yield trace
    finally:
        _here.trace = outer


def line_of(tensor: Tensor) -> str:
    """Return the user's line that made a value, "file:line"; the current line for a constant."""
    if not isinstance(tensor, TracedTensor):
        return users_line()
    assert isinstance(tensor.trace, Trace)
    return tensor.trace.nodes[tensor.id].source


def check_outside(what: str, instead: str) -> None:
    """Raise an error inside a step."""
    if current_trace() is not None:
        raise UsageError(f"{users_line()}: {what} was called inside a step; {instead}")
