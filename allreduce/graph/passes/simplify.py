"""Algebraic simplification and common subexpression elimination."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from allreduce.graph.core.node import Graph, Node, Rewriter
from allreduce.graph.core.op_table import lookup

# Operators that give one operand unchanged where the other is this number: on either side, or on
# the right one only. Of floats, -0.0 + 0.0 is 0.0, and so is no -0.0.
_NEUTRAL = {"add": -0.0, "multiply": 1.0}
_NEUTRAL_RIGHT = {"subtract": 0.0, "divide": 1.0, "power": 1.0}
# Operators that do nothing unless they change the spec, and operators that cancel when applied
# twice.
_SHAPED = ("cast", "reshape", "broadcast_to", "sum_to", "stop_gradient")
_INVOLUTIONS = ("negative", "logical_not")


def simplify(graph: Graph) -> Graph:
    """Remove operations that return an input unchanged or that repeat another node."""
    rewriter = Rewriter(graph)
    seen: dict[Hashable, int] = {}
    for node in graph.nodes:
        same = _same_as(rewriter, node)
        if same is None:
            key = _key(rewriter, node)
            if key is None or key not in seen:
                rewriter.keep(node)
                if key is not None:
                    seen[key] = rewriter.moved[node.id]
                continue
            same = seen[key]
        rewriter.moved[node.id] = same
    return rewriter.finish()


def _same_as(rewriter: Rewriter, node: Node) -> int | None:
    """Find the new node that a node gives unchanged, if its device is not another one."""
    if node.control:
        return None
    for found in _candidates(node, [rewriter.nodes[rewriter.moved[i]] for i in node.inputs]):
        other = rewriter.nodes[found]
        if other.spec == node.spec and other.device == node.device:
            return found
    return None


def _candidates(node: Node, inputs: list[Node]) -> Iterator[int]:
    """Yield the new nodes whose value a node gives, if they are of the same spec."""
    if node.op in _NEUTRAL and _is(inputs[0], _NEUTRAL[node.op]):
        yield inputs[1].id
    number = _NEUTRAL.get(node.op, _NEUTRAL_RIGHT.get(node.op))
    if number is not None and _is(inputs[1], number):
        yield inputs[0].id
    if node.op in _SHAPED or (
        node.op == "transpose" and node.attrs["axes"] == tuple(range(node.spec.ndim))
    ):
        yield inputs[0].id
    if node.op in _INVOLUTIONS and inputs[0].op == node.op:
        yield inputs[0].inputs[0]


def _is(node: Node, number: float) -> bool:
    """Whether a node is a constant, of any shape, that is this number everywhere."""
    if node.op != "constant":
        return False
    value = node.attrs["value"]
    if not value.size or not (value == number).all():
        return False
    return value.dtype.kind != "f" or bool((np.signbit(value) == np.signbit(number)).all())


def _key(rewriter: Rewriter, node: Node) -> Hashable | None:
    """Describe a node's computation; None if computing it once differs from computing it twice."""
    if lookup(node.op).kind != "compute" or node.control:
        return None
    inputs = tuple(rewriter.moved[i] for i in node.inputs)
    try:
        attrs = tuple(sorted((key, _comparable(value)) for key, value in node.attrs.items()))
        key = (node.op, inputs, attrs, node.spec, node.device)
        hash(key)
    except TypeError:  # attributes that cannot be compared
        return None
    return key


def _comparable(value: Any) -> Hashable:
    """Tell numbers apart that are equal and not the same, such as 0, 0.0, -0.0 and False."""
    if isinstance(value, tuple):
        return tuple(_comparable(each) for each in value)
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    if isinstance(value, np.ndarray):
        raise TypeError("an array")
    return type(value).__name__, repr(value) if isinstance(value, float | np.generic) else value
