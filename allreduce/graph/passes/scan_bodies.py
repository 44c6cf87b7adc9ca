"""Apply passes to the bodies of scans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from allreduce.graph.core.node import Graph, Rewriter
from allreduce.graph.trace.subgraph import Body, results_read


def inside(graph: Graph, optimize: Callable[[Graph], Graph]) -> Graph:
    """Remove unread results of scans, and optimize their bodies."""
    if not any(node.op == "scan" for node in graph.nodes):
        return graph
    asked = results_read(graph.nodes)
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        attrs = node.attrs
        if node.op == "scan":
            body = _trimmed(attrs["body"], asked.get(node.id, set()), optimize)
            attrs = {**attrs, "body": body}
        rewriter.keep(node, attrs=attrs)
    return rewriter.finish()


def _trimmed(body: Body, asked: set[int], optimize: Callable[[Graph], Graph]) -> Body:
    carry, rest = body.graph.outputs[: body.carries], body.graph.outputs[body.carries :]
    made = [(i, node) for i, node in zip(body.made, rest, strict=True) if i in asked]
    outputs = (*carry, *(node for _, node in made))
    graph = optimize(replace(body.graph, outputs=outputs))
    return replace(body, graph=graph, made=tuple(i for i, _ in made))
