"""Partition: one send and one receive for each tensor that a node on another device reads."""

from __future__ import annotations

from allreduce.graph.node import Graph, Node, Rewriter

# Every device has these by itself, so they are not sent but made where they are read.
_ANYWHERE = ("constant", "runtime")


def partition(graph: Graph) -> Graph:
    """Insert transfers so that every node reads values of its own device only.

    A tensor goes to each destination once, however many nodes read it there. The rendezvous of a
    send and its receive is keyed by the edge, the source and the destination; the executor adds
    generation and step.
    """
    rewriter = Rewriter(graph)
    arrived: dict[tuple[int, str], int] = {}
    for node in graph.nodes:
        inputs = tuple(_local(rewriter, node, i, arrived) for i in node.inputs)
        rewriter.keep(node, inputs=inputs)
    return rewriter.finish()


def _local(
    rewriter: Rewriter, reader: Node, source: int, arrived: dict[tuple[int, str], int]
) -> int:
    node = rewriter.old.nodes[source]
    moved = rewriter.moved[source]
    if node.device == reader.device or node.op in _ANYWHERE:
        return moved
    destination = str(reader.device)
    key = (source, destination)
    if key not in arrived:
        edge = {"edge": source, "source": str(node.device), "destination": destination}
        sent = rewriter.add(node, op="send", inputs=(moved,), attrs=edge, control=())
        arrived[key] = rewriter.add(
            node, op="receive", inputs=(), attrs=edge, control=(sent,), device=reader.device
        )
    return arrived[key]
