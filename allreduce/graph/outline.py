"""A step in words: what ranks compare of programs that change variables or exchange values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allreduce.graph.node import Graph, Node
from allreduce.graph.ops.base import lookup
from allreduce.graph.ops.windows import Windows

Outline = tuple[tuple[str, str], ...]  # of each operation what it does, and the user's line

# Attributes that are integers and the same whatever arrays a rank brings; shapes, parts of them and
# counts of rows may be its own.
_PLACES = ("axis", "axes", "depth", "groups", "k", "key")


def outline(graph: Graph) -> Outline:
    """List the operations that changes and collectives depend on, in the order of their recording.

    What a rank may have for itself is left out: the values of constants, shapes, devices, and what
    it returns beside.
    """
    wanted: set[int] = set()
    for node in reversed(graph.nodes):
        shared = node.op == "apply_gradients" or lookup(node.op).kind == "collective"
        if shared or node.id in wanted:
            wanted.add(node.id)
            wanted.update(node.inputs)
    numbers = {old: new for new, old in enumerate(sorted(wanted))}
    return tuple((_words(graph.nodes[i], numbers), graph.nodes[i].source) for i in numbers)


def difference(
    rank: int, program: Sequence[Sequence[str]], other_rank: int, other: Sequence[Sequence[str]]
) -> str | None:
    """Say where two ranks' outlines differ first; None where they do not."""
    remedy = "run the same function on every rank"
    for place, (mine, theirs) in enumerate(zip(program, other, strict=False)):
        if mine[0] != theirs[0]:
            shown = [f"{words} ({source})" for words, source in (mine, theirs)]
            return (
                f"operation {place} of the step is {shown[0]} on rank {rank} but {shown[1]} on "
                f"rank {other_rank}; {remedy}"
            )
    if len(program) == len(other):
        return None
    return (
        f"the step has {len(program)} operations on rank {rank} but {len(other)} on rank "
        f"{other_rank}; {remedy}"
    )


def own_part(name: str) -> str:
    """Leave out a model's own name: its number counts the models of one process."""
    return name.partition("/")[2] or name


def _words(node: Node, numbers: dict[int, int]) -> str:
    reads = [f"%{numbers[i]}" for i in node.inputs]
    told = ((key, _without_sizes(value)) for key, value in sorted(node.attrs.items()))
    said = [f"{key}={value!r}" for key, value in told if _is_said(key, value)]
    if node.op == "read":
        said = [repr(own_part(node.attrs["variable"].name))]
    return f"{node.op}({', '.join([*reads, *said])}) {node.spec.dtype.name}"


def _without_sizes(value: Any) -> Any:
    """Leave out what "same" padding makes of the sizes of images, which may be a rank's own."""
    if not isinstance(value, Windows):
        return value
    around = zip(value.strides, value.before, value.after, strict=True)
    padding = [each[1:] if each[0] == 1 else None for each in around]
    return f"{value.size} strides={value.strides} dilation={value.dilation} padding={padding}"


def _is_said(key: str, value: Any) -> bool:
    return key in _PLACES or isinstance(value, str | bool | float)
