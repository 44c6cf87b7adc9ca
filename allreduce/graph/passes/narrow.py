"""Move rectifiers' gradients behind max-pooling, to the smaller size of pooled images."""

from __future__ import annotations

from dataclasses import replace

from allreduce.graph.core.node import Graph, Node, Rewriter


def narrow(graph: Graph) -> Graph:
    """Apply a rectifier's gradient before that of max-pooling instead of after it.

    A window's gradient goes to a pixel that has the window's value, so the rectifier's gradient can
    test the value instead of the pixel. It then handles fewer elements. Results have the same bits.
    """
    consumers = graph.consumers()
    kept = {*graph.outputs, *graph.effects, *(i for node in graph.nodes for i in node.control)}
    late: dict[int, Node] = {}  # rectifiers' gradients, by the gradients of the pooling before them
    for node in graph.nodes:
        if node.op == "relu_gradient" and _follows_pooling(graph, node):
            pooling = node.inputs[0]
            if consumers[pooling] == [node.id] and pooling not in kept:
                late[pooling] = node
    rewriter = Rewriter(graph)
    done: dict[int, int] = {node.id: pooling for pooling, node in late.items()}
    for node in graph.nodes:
        if node.id in late:
            dy, x, y = node.inputs
            stopped = replace(late[node.id], inputs=(dy, y), spec=graph.nodes[dy].spec)
            rewriter.keep(stopped)
            rewriter.keep(replace(node, inputs=(stopped.id, x, y)))
        elif node.id in done:
            rewriter.moved[node.id] = rewriter.moved[done[node.id]]
        else:
            rewriter.keep(node)
    return rewriter.finish()


def _follows_pooling(graph: Graph, node: Node) -> bool:
    """Whether a rectifier's gradient looks at the images of which the pooling's is."""
    gradient = graph.nodes[node.inputs[0]]
    if gradient.op != "max_pool2d_gradient" or node.control or gradient.control:
        return False
    dy, x, y = (graph.nodes[i] for i in gradient.inputs)
    is_pooled = y.op == "max_pool2d" and y.inputs == (x.id,) and y.attrs == gradient.attrs
    alike = dy.spec.dtype == y.spec.dtype and node.spec == gradient.spec
    devices = {each.device for each in (node, gradient, dy, x, y)}
    return is_pooled and alike and node.inputs[1] == x.id and len(devices) == 1
