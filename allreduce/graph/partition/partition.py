"""Partition: split a graph by task and device, and insert transfers between the parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.spec import Spec, concrete
from allreduce.graph.schedule.dependence import dependents, of_samples

# Every device can make these, so they are not sent.
ANYWHERE = ("constant", "runtime")

_ROWS = 1000  # to compare sizes; the batch size is unknown
_NOTHING = Spec((), np.dtype(np.int64))

Place = Callable[[Node], Hashable]


def partition(graph: Graph) -> Graph:
    """Insert transfers so that every node reads values of its own device only.

    A tensor is sent to each task once, and from there to each of its devices once, however many
    nodes read it. The rendezvous key of a transfer is the edge, the source and the destination; the
    executor adds generation and step. Inputs and outputs of devices with their own memory are
    copied. A control edge between tasks becomes a transfer without a value.
    """
    whole = _copy_with_host(graph)
    cut = _Cut(_Cut(whole, task_of, True).run(), lambda node: node.device, False).run()
    return cut if len(cut.nodes) == len(whole.nodes) else _without_unused_views(cut)


def partition_tasks(graph: Graph) -> Graph:
    """Insert the transfers between tasks only."""
    return _Cut(graph, task_of, True).run()


def task_of(node: Node) -> DeviceName:
    """Return the task of a placed node, as a device name without a device."""
    assert node.device is not None, node
    return DeviceName(job=node.device.job, replica=node.device.replica, task=node.device.task)


def _without_unused_views(graph: Graph) -> Graph:
    """Remove views that were only repeated, on other devices."""
    read = {*graph.outputs, *graph.effects}
    for node in reversed(graph.nodes):
        if lookup(node.op).view is None or node.id in read:
            read.update((node.id, *node.before))
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.id in read:
            rewriter.keep(node)
    return rewriter.finish()


def _is_free(node: Node, graph: Graph) -> bool:
    """Return whether a node is a view of a whole value, not of a part."""
    if lookup(node.op).view is None or node.control:
        return False
    whole, seen = (
        prod(concrete(each.spec.shape, _ROWS, _ROWS))
        for each in (graph.nodes[node.inputs[0]], node)
    )
    return whole <= seen


@dataclass(slots=True)
class _Cut:
    """One split of a graph: inserts transfers between nodes of different places."""

    graph: Graph
    place: Place
    across: bool  # from task to task
    rewriter: Rewriter = field(init=False)
    of_samples: set[int] = field(init=False)
    arrived: dict[Hashable, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rewriter = Rewriter(self.graph)
        self.of_samples = dependents(self.graph.nodes, of_samples)

    def run(self) -> Graph:
        """Rebuild the graph with transfers."""
        for node in self.graph.nodes:
            inputs = tuple(self._value(node, i) for i in node.inputs)
            control = tuple(self._control_edge(node, i) for i in node.control)
            self.rewriter.keep(node, inputs=inputs, control=tuple(dict.fromkeys(control)))
        return self.rewriter.finish()

    def _value(self, reader: Node, i: int) -> int:
        node = self.graph.nodes[i]
        if node.op in ANYWHERE or self.place(node) == self.place(reader):
            return self.rewriter.moved[i]
        if _is_free(node, self.graph):
            return self._repeated_view(node, reader)
        return self._transfer(node, reader, (self.rewriter.moved[i],), ())

    def _repeated_view(self, node: Node, reader: Node) -> int:
        """Repeat a view where it is read, so that it has the same strides there.

        Sums read memory in the order of strides; a copy with other strides would round differently.
        """
        key = (node.id, self.place(reader), "view")
        if key not in self.arrived:
            base = self._value(reader, node.inputs[0])
            self.arrived[key] = self.rewriter.add(
                node, inputs=(base,), control=(), device=reader.device
            )
        return self.arrived[key]

    def _control_edge(self, later: Node, i: int) -> int:
        """Return the transfer that replaces a control edge from another task."""
        node, moved = self.graph.nodes[i], self.rewriter.moved[i]
        if not self.across or task_of(node) == task_of(later) or node.op in ANYWHERE:
            return moved
        return self._transfer(replace(node, spec=_NOTHING), later, (), (moved,))

    def _transfer(
        self, node: Node, reader: Node, inputs: tuple[int, ...], control: tuple[int, ...]
    ) -> int:
        key = (node.id, self.place(reader), bool(inputs))
        if key not in self.arrived:
            edge = {
                "edge": node.id if inputs else -1 - node.id,
                "source": str(node.device),
                "destination": str(reader.device),
                "across": self.across,
                "of_samples": bool(inputs) and node.id in self.of_samples,
            }
            sent = self.rewriter.add(node, op="send", inputs=inputs, attrs=edge, control=control)
            self.arrived[key] = self.rewriter.add(
                node, op="receive", inputs=(), attrs=edge, control=(sent,), device=reader.device
            )
        return self.arrived[key]


def _copy_with_host(graph: Graph) -> Graph:
    """Insert copies of inputs and outputs between the host and devices with their own memory.

    A graph on CPUs stays as it is. Arguments are on the device before the step begins, by a
    `Stager` or `BoundProgram.place`; the `feed` instruction passes them on.
    """
    if not any(_is_off_host(node) for node in graph.nodes):
        return graph
    rewriter = Rewriter(graph)
    fed: dict[int, int] = {}  # of each input: the new one
    for node in graph.nodes:
        fed[node.id] = rewriter.keep(node)
        if node.op == "placeholder" and _is_off_host(node):
            made = rewriter.add(node, op="feed", inputs=(fed[node.id],), attrs={}, control=())
            rewriter.moved[node.id] = made
    outputs = [_fetched(rewriter, graph.nodes[i]) for i in graph.outputs]
    inputs = tuple(fed[i] for i in graph.inputs)
    return replace(rewriter.finish(), inputs=inputs, outputs=tuple(outputs))


def _fetched(rewriter: Rewriter, node: Node) -> int:
    """Copy an output to the host; returns the copy's id."""
    value = rewriter.moved[node.id]
    if not _is_off_host(node):
        return value
    if not _is_computed(node, rewriter.old):  # the next step changes its memory
        value = rewriter.add(node, op="snapshot", inputs=(value,), attrs={}, control=())
    return rewriter.add(node, op="fetch", inputs=(value,), attrs={}, control=())


def _is_computed(node: Node, graph: Graph) -> bool:
    """Return whether a kernel computes a value, or the value that it is a view of."""
    while lookup(node.op).view is not None:
        node = graph.nodes[node.inputs[0]]
    return lookup(node.op).kind == "compute"


def _is_off_host(node: Node) -> bool:
    return node.device is not None and not node.device.on_host
