"""The graph: immutable nodes in topological order. Every pass takes a Graph and returns another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from allreduce.devices.names import DeviceName
from allreduce.graph.core.spec import Spec

GRADIENT = "gradient of "  # the prefix of a part that holds another part's gradient
LOSS = f"{GRADIENT}the loss"  # the part of gradients of operations outside of layers


@dataclass(frozen=True, slots=True)
class Node:
    """One operation and the value that it computes.

    Attributes:
        id: Its index in `Graph.nodes`; inputs and control edges point to smaller ids.
        op: The name of a row of the operator table.
        inputs: The ids of the nodes whose values it reads.
        attrs: Further parameters of the operation; never changed.
        spec: The shape and dtype of its value.
        device: The device that the user asked for; after placement, the device that it runs on.
        control: The ids of nodes that must run before it but that it does not read.
        source: The user's line that made it, "file:line".
        beside: Before placement, the node whose device it must share.
        part: The part of the model, "sequential/0", or its gradient; empty outside of layers.
    """

    id: int
    op: str
    inputs: tuple[int, ...]
    attrs: Mapping[str, Any]
    spec: Spec
    device: DeviceName | None = None
    control: tuple[int, ...] = ()
    source: str = ""
    beside: int | None = None
    part: str = ""

    @property
    def before(self) -> tuple[int, ...]:
        """The ids of all nodes that must run before this one."""
        return self.inputs + self.control

    def __str__(self) -> str:
        reads = ", ".join(f"%{i}" for i in self.inputs)
        after = f" after {', '.join(f'%{i}' for i in self.control)}" if self.control else ""
        place = f" @ {self.device}" if self.device else ""
        return f"%{self.id} = {self.op}({reads}) {self.spec}{after}{place}"


def describe_part(part: str) -> str:
    """Describe a part of a model: "layer 'sequential/0'", "the gradient of the loss"."""
    if part == LOSS:
        return f"the {part}"
    layer = part.removeprefix(GRADIENT)
    return f"{'' if layer == part else f'the {GRADIENT}'}layer {layer!r}"


def blame(error: Exception, node: Node) -> None:
    """Add a note to an error: the operator that raised it, its layer and the user's line."""
    of = f" of {describe_part(node.part)}" if node.part else ""
    note = f"operator {node.op!r}{of} at {node.source}"
    if note not in getattr(error, "__notes__", ()):  # of a communicator, it is raised again
        error.add_note(note)


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in topological order, with inputs, outputs and nodes with effects."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    effects: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = [str(node) for node in self.nodes]
        lines.append(f"return {', '.join(f'%{i}' for i in self.outputs)}")
        return "\n".join(lines)

    def consumers(self) -> list[list[int]]:
        """List for each node the nodes that read its value."""
        lists: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for i in dict.fromkeys(node.inputs):
                lists[i].append(node.id)
        return lists


@dataclass(slots=True)
class Rewriter:
    """Builds a Graph from another one's nodes with new ids; passes use it."""

    old: Graph
    nodes: list[Node] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)

    def add(self, node: Node, **changes: Any) -> int:
        """Append a node whose edges already are new ids; returns its new id."""
        new = replace(node, id=len(self.nodes), **changes)
        self.nodes.append(new)
        return new.id

    def keep(self, node: Node, **changes: Any) -> int:
        """Append an old node with its edges translated; returns its new id."""
        edges = {
            "inputs": tuple(self.moved[i] for i in node.inputs),
            "control": tuple(dict.fromkeys(self.moved[i] for i in node.control if i in self.moved)),
            "beside": None if node.beside is None else self.moved.get(node.beside),
        }
        self.moved[node.id] = self.add(node, **{**edges, **changes})
        return self.moved[node.id]

    def finish(self, effects: Iterable[int] | None = None) -> Graph:
        """Close the new graph; `effects` are new ids, by default the old ones that were kept."""
        kept = [self.moved[i] for i in self.old.effects if i in self.moved]
        return Graph(
            tuple(self.nodes),
            tuple(self.moved[i] for i in self.old.inputs if i in self.moved),
            tuple(self.moved[i] for i in self.old.outputs),
            tuple(kept if effects is None else effects),
        )
