"""Describe a step for comparison: changes of variables, collectives, and their inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from allreduce.graph.consistency.rank_check import Fact, Facts
from allreduce.graph.core.naming import own_part
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.spec import show
from allreduce.graph.ops.array.windows import Windows
from allreduce.graph.trace.subgraph import Body
from allreduce.graph.trace.variable import Variable

# Attributes that are integers and the same whatever arrays a rank brings; shapes, parts of them and
# counts of rows may be its own.
_PLACES = ("axis", "axes", "depth", "groups", "k", "key")

_OF_VARIABLES = ("read", "assign")

_SAME_FUNCTION = "run the same function on every rank"
_SAME_DRAWS = (
    f"{_SAME_FUNCTION}; random numbers depend on the seed and on the number of earlier draws: call "
    "ar.set_seed with one number on every rank, and draw as often on all"
)
_SAME_KINDS = f"{_SAME_FUNCTION}, with arrays of one dtype, and rows of one shape"


def outline(graph: Graph) -> Facts:
    """List changes of variables, collectives, and their inputs, in the order of recording.

    Facts that may differ between ranks are left out: values of constants, shapes, devices, and
    further results.
    """
    lines = enumerate(_lines(graph, _numbers(graph, _shared(graph))))
    return {f"{name or f'operation {place}'} of the step": fact for place, (name, fact) in lines}


def involved(graph: Graph) -> tuple[Variable, ...]:
    """List the variables that changes and collectives depend on, or change.

    They are the same on all ranks whose outlines are, and in the same order.
    """
    found: dict[Variable, None] = {}
    for i in _numbers(graph, _shared(graph)):
        attrs = graph.nodes[i].attrs
        own = [attrs["variable"]] if "variable" in attrs else attrs.get("variables", ())
        found.update(dict.fromkeys(own))
    return tuple(found)


def _shared(graph: Graph) -> Iterator[int]:
    """List the changes of variables, and the collectives."""
    for node in graph.nodes:
        if node.op in ("apply_gradients", "assign") or lookup(node.op).kind == "collective":
            yield node.id


def _numbers(graph: Graph, ends: Iterable[int]) -> dict[int, int]:
    """Number some nodes and all their inputs, in the order of their recording."""
    wanted = set(ends)
    for node in reversed(graph.nodes):
        if node.id in wanted:
            wanted.update(node.inputs)
    return {old: new for new, old in enumerate(sorted(wanted))}


def _lines(graph: Graph, numbers: dict[int, int]) -> Iterator[tuple[str, Fact]]:
    """Describe the numbered operations, and behind each scan its step; arguments have a name."""
    asked: dict[int, set[int]] = {}
    for i in numbers:
        if graph.nodes[i].op == "scan_result":
            asked.setdefault(graph.nodes[i].inputs[0], set()).add(graph.nodes[i].attrs["index"])
    for i in numbers:
        node = graph.nodes[i]
        yield _fact(node, _words(graph, node, numbers))
        if node.op == "scan":
            yield from _step(node, asked.get(i, set()))


def _fact(node: Node, words: str) -> tuple[str, Fact]:
    """Describe an operation, of which `words` are compared."""
    size, where = show(node.spec.shape), node.source
    if node.op == "placeholder":
        return node.attrs["name"], Fact(f"{node.spec.dtype} {size}", _SAME_KINDS, words)
    if node.op in _OF_VARIABLES:  # whose whole name may count the models of one process
        where = f"{node.attrs['variable'].name!r} at {where}"
    remedy = _SAME_DRAWS if "key" in node.attrs else _SAME_FUNCTION
    return "", Fact(f"{words} {size}", remedy, words, where)


def _step(scan: Node, asked: Collection[int]) -> Iterator[tuple[str, Fact]]:
    """Summarise a scan's step: the next carry, and the requested results."""
    body: Body = scan.attrs["body"]
    results = [*range(body.carries), *body.made]
    ends = {
        result: i
        for result, i in zip(results, body.graph.outputs, strict=True)
        if result < body.carries or result in asked
    }
    numbers = _numbers(body.graph, ends.values())
    yield from (("", fact) for _, fact in _lines(body.graph, numbers))
    given = ", ".join(f"{result}=%{numbers[i]}" for result, i in ends.items())
    yield "", Fact(f"the end of a step of scan({given})", _SAME_FUNCTION, where=scan.source)


def _words(graph: Graph, node: Node, numbers: dict[int, int]) -> str:
    reads = [f"%{numbers[i]}" for i in node.inputs]
    told = ((key, _without_sizes(value)) for key, value in sorted(node.attrs.items()))
    said = [f"{key}={value!r}" for key, value in told if _is_said(key, value)]
    if node.op in _OF_VARIABLES:
        said = [repr(own_part(node.attrs["variable"].name))]
    elif node.op == "scan":
        said = _of_scan(node.attrs["body"])
    elif node.op == "scan_result":
        said = [_of_result(graph.nodes[node.inputs[0]].attrs["body"], node.attrs["index"])]
    return f"{node.op}({', '.join([*reads, *said])}) {node.spec.dtype.name}"


def _of_scan(body: Body) -> list[str]:
    # A length that elements give is a part of their shapes, and so may be a rank's own.
    length = [] if body.elements else [f"length={body.length}"]
    return [*length, f"reverse={body.reverse}"]


def _of_result(body: Body, index: int) -> str:
    # The carries before each step are the last ones; how many there are in between is a rank's own.
    return f"index={index - len(body.specs) if index in body.kept else index}"


def _without_sizes(value: Any) -> Any:
    """Leave out paddings that follow from the sizes of images, which may differ between ranks."""
    if not isinstance(value, Windows):
        return value
    around = zip(value.strides, value.before, value.after, strict=True)
    padding = ["same" if value.same and each[0] > 1 else each[1:] for each in around]
    return f"{value.size} strides={value.strides} dilation={value.dilation} padding={padding}"


def _is_said(key: str, value: Any) -> bool:
    return key in _PLACES or isinstance(value, str | bool | float)
