"""Have every reader of a variable see the value it read, despite later assignments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup


def order_reads(graph: Graph) -> Graph:
    """Order changes of a variable after its earlier readers, or copy the value.

    A read is a view of the variable's memory, so a change waits for the nodes that use an earlier
    read. If such a use depends on the change, or is a fetch, the read gets `copy=True`, and only
    the copy must precede the change.
    """
    consumers = graph.consumers()
    reads: dict[object, list[Node]] = defaultdict(list)
    copied: set[int] = set()
    waits: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.op == "read":
            reads[node.attrs["variable"]].append(node)
        earlier = [read for key in node.attrs.get("changes", ()) for read in reads[key]]
        for read in earlier:
            uses = list(_uses(graph, consumers, read.id))
            late = any(use > node.id for use in uses) or read.id in graph.outputs
            fetched = any(use in graph.outputs and _is_view(graph, use) for use in uses)
            if late or fetched:
                copied.add(read.id)
            waits.setdefault(node.id, []).append(read.id)
            waits[node.id] += [] if read.id in copied else [use for use in uses if use != node.id]
        for key in node.attrs.get("changes", ()):  # the next one waits for this one, and so for all
            reads[key].clear()
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        extra = tuple(rewriter.moved[i] for i in waits.get(node.id, ()))
        control = tuple(rewriter.moved[i] for i in node.control) + extra
        attrs = {**node.attrs, "copy": True} if node.id in copied else node.attrs
        rewriter.keep(node, control=tuple(dict.fromkeys(control)), attrs=attrs)
    return rewriter.finish()


def _uses(graph: Graph, consumers: list[list[int]], start: int) -> Iterator[int]:
    """Yield the nodes that use a value's memory, through any views of it."""
    for use in consumers[start]:
        yield use
        if _is_view(graph, use):
            yield from _uses(graph, consumers, use)


def _is_view(graph: Graph, node: int) -> bool:
    return lookup(graph.nodes[node].op).view is not None
