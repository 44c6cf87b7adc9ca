"""The body of a scan: a graph that is recorded inside another trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.core.op_table import Attrs, lookup
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import GLOBAL_BATCH, Dim, Spec
from allreduce.graph.core.tensor import TracedTensor
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.trace import Trace

# A placeholder that a scan's results read. It counts as a float, so that gradients flow through it.
HANDLE = Spec((), np.dtype(np.float64))


def results_read(nodes: Iterable[Node]) -> dict[int, set[int]]:
    """Find the results of each scan that are read, by their indices."""
    found: dict[int, set[int]] = {}
    for node in nodes:
        if node.op == "scan_result":
            found.setdefault(node.inputs[0], set()).add(node.attrs["index"])
    return found


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a scan, and its number of iterations.

    A scan's results are, in this order: the last carry, the outputs of all iterations, and the
    carry before each iteration. Indices of results count through all three.

    Attributes:
        graph: Its inputs are the carry, the elements of one iteration, and constant inputs; its
            outputs are the next carry and the outputs of the iteration.
        carries: The number of tensors in the carry.
        elements: The number of elements of one iteration.
        made: For each output after the carry, the index of the result that stacks it.
        reverse: Whether iteration starts at the last elements.
    """

    graph: Graph
    carries: int
    elements: int
    made: tuple[int, ...]
    specs: tuple[Spec, ...]
    length: int
    reverse: bool

    @classmethod
    def of(cls, graph: Graph, carries: int, elements: int, length: int, reverse: bool) -> Body:
        """Describe a scan that returns all its results."""
        each = [graph.nodes[i].spec for i in graph.outputs]
        stacked = [Spec((length, *spec.shape), spec.dtype) for spec in each]
        specs = (*each[:carries], *stacked[carries:], *stacked[:carries])
        made = tuple(range(carries, len(each)))
        return cls(graph, carries, elements, made, specs, length, reverse)

    @property
    def kept(self) -> range:
        """The numbers of the results that are the carry before each step."""
        return range(len(self.specs) - self.carries, len(self.specs))


def with_bodies(nodes: Iterable[Node]) -> Iterator[Node]:
    """Iterate over nodes, each scan followed by its body's nodes, recursively."""
    for node in nodes:
        yield node
        if node.op == "scan":
            yield from with_bodies(node.attrs["body"].graph.nodes)


def joins_rows(nodes: Iterable[Node]) -> bool:
    """Return whether a value has the rows of all replicas, whose number must be known."""
    sizes = (size for node in with_bodies(nodes) for size in node.spec.shape)
    return any(isinstance(size, Dim) and size.name == GLOBAL_BATCH.name for size in sizes)


class BodyTrace(Trace):
    """A body while it is recorded: outer tensors that it reads become inputs."""

    def __init__(self, outer: Trace) -> None:
        super().__init__(outer.replicas)
        self._outer = outer
        self._captured: dict[int, TracedTensor] = {}

    @property
    def captured(self) -> list[TracedTensor]:
        """The outer tensors that the body reads, in the order of its last inputs."""
        nodes = self._outer.nodes
        return [TracedTensor(self._outer, i, nodes[i].spec) for i in self._captured]

    def placeholder(self, spec: Spec, name: str, *, varies: bool = False) -> TracedTensor:
        # The number identifies the scan's input on all ranks.
        return super().placeholder(spec, f"{name} {len(self.inputs)}", varies=varies)

    def own(self, tensor: TracedTensor, what: str) -> TracedTensor:
        if tensor.trace is self:
            return tensor
        outer = self._outer.own(tensor, what)
        if outer.id not in self._captured:
            self._captured[outer.id] = self.placeholder(outer.spec, "outside")
        return self._captured[outer.id]

    def _record(self, node: Node) -> None:
        kind, op = lookup(node.op).kind, node.op
        if kind == "effect":
            self._refuse(
                f"changes something outside ({op})", "return the value, and do so after it"
            )
        if kind == "collective":
            self._refuse(f"exchanges values between replicas ({op})", "do so before or after it")
        super()._record(node)

    def value(self, given: Any) -> TracedTensor:
        """Return this trace's tensor for an operand."""
        tensor = as_tensor(given)
        assert isinstance(tensor, TracedTensor)
        return self.own(tensor, "ar.scan")

    def runtime(self, name: str) -> TracedTensor:
        return self.own(self._outer.runtime(name), name)

    def read(self, key: Hashable, spec: Spec, attrs: Attrs, place: DeviceName) -> TracedTensor:
        return self.own(self._outer.read(key, spec, attrs, place), "read")

    def next_draw(self) -> int:
        self._refuse(
            "draws random numbers, which would be the same in every step",
            "draw them before, with one more axis in front, and scan over that",
        )

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise UsageError(f"{users_line()}: the function of ar.scan {what}; {remedy}")

    def copy(self, graph: Graph, inputs: Sequence[TracedTensor]) -> list[TracedTensor]:
        """Append a graph's nodes, with other inputs; returns its outputs."""
        moved = {i: tensor.id for i, tensor in zip(graph.inputs, inputs, strict=True)}
        for node in graph.nodes:
            if node.id not in moved:
                moved[node.id] = len(self.nodes)
                reads = tuple(moved[i] for i in node.inputs)
                self.nodes.append(replace(node, id=len(self.nodes), inputs=reads, beside=None))
        return [TracedTensor(self, moved[i], graph.nodes[i].spec) for i in graph.outputs]


def record(trace: Trace, body: Body, inputs: Sequence[TracedTensor]) -> list[TracedTensor]:
    """Append a scan, followed by all its results."""
    handle = trace.add("scan", inputs, {"body": body}, HANDLE)
    return [
        trace.add("scan_result", [handle], {"index": index, "spec": spec}, spec)
        for index, spec in enumerate(body.specs)
    ]
