"""A step in words: what ranks compare of the programs that change their variables."""

from __future__ import annotations

from typing import Any

from allreduce.graph.node import Graph, Node

Outline = tuple[tuple[str, str], ...]  # of each operation what it does, and the user's line

# Attributes that are integers and the same whatever arrays a rank brings; shapes and counts of rows
# may be its own.
_PLACES = ("axis", "axes", "depth", "key")


def outline(graph: Graph) -> Outline:
    """List the operations that changes of variables depend on, in the order of their recording.

    What a rank may have for itself is left out: the values of constants, shapes, devices, and what
    it returns beside.
    """
    wanted: set[int] = set()
    for node in reversed(graph.nodes):
        if node.op == "apply_gradients" or node.id in wanted:
            wanted.add(node.id)
            wanted.update(node.inputs)
    numbers = {old: new for new, old in enumerate(sorted(wanted))}
    return tuple((_words(graph.nodes[i], numbers), graph.nodes[i].source) for i in numbers)


def own_part(name: str) -> str:
    """Leave out a model's own name: its number counts the models of one process."""
    return name.partition("/")[2] or name


def _words(node: Node, numbers: dict[int, int]) -> str:
    reads = [f"%{numbers[i]}" for i in node.inputs]
    said = [f"{key}={value!r}" for key, value in sorted(node.attrs.items()) if _is_said(key, value)]
    if node.op == "read":
        said = [repr(own_part(node.attrs["variable"].name))]
    return f"{node.op}({', '.join([*reads, *said])}) {node.spec.dtype.name}"


def _is_said(key: str, value: Any) -> bool:
    return key in _PLACES or isinstance(value, str | bool | float)
