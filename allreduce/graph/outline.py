"""A step in words: what ranks compare of programs that change variables or exchange values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from allreduce.graph.body import Body
from allreduce.graph.naming import own_part
from allreduce.graph.node import Graph, Node
from allreduce.graph.ops.base import lookup
from allreduce.graph.ops.windows import Windows
from allreduce.graph.spec import show
from allreduce.graph.variable import Variable


class Line(NamedTuple):
    """What an operation of a step does.

    Attributes:
        words: What has to be the same on all ranks.
        source: The user's line.
        full: The words for people, where these are to know more: a variable's whole name, which may
            count the models of one process; and "argument 0: float32 (rows, 3)".
    """

    words: str
    source: str
    full: str = ""


Outline = tuple[Line, ...]

# Attributes that are integers and the same whatever arrays a rank brings; shapes, parts of them and
# counts of rows may be its own.
_PLACES = ("axis", "axes", "depth", "groups", "k", "key")

_OF_VARIABLES = ("read", "assign")

_SAME_FUNCTION = "run the same function on every rank"
_SAME_DRAWS = (
    "random numbers come of the seed and of how many draws were before them: call ar.set_seed with "
    "one number on every rank, and draw as often on all"
)
_SAME_KINDS = "give the step arrays of one dtype, and rows of one shape, on every rank"


def outline(graph: Graph) -> Outline:
    """List changes of variables, collectives, and what they depend on, in the order of recording.

    What a rank may have for itself is left out: the values of constants, shapes, devices, and what
    it returns beside.
    """
    return tuple(_lines(graph, _numbers(graph, _shared(graph))))


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
    """List what changes variables, and collectives."""
    for node in graph.nodes:
        if node.op in ("apply_gradients", "assign") or lookup(node.op).kind == "collective":
            yield node.id


def difference(
    rank: int, program: Sequence[Sequence[str]], other_rank: int, other: Sequence[Sequence[str]]
) -> str | None:
    """Say where two ranks' outlines differ first; None where they do not."""
    lines, others = [Line(*each) for each in program], [Line(*each) for each in other]
    pairs = enumerate(zip(lines, others, strict=False))
    place = next((i for i, (one, two) in pairs if one.words != two.words), None)
    if place is None and len(lines) == len(others):
        return None

    def both(what: str, mine: str, theirs: str) -> str:
        return f"{what} {mine} on rank {rank} but {theirs} on rank {other_rank}"

    given = _differing(_arguments(lines), _arguments(others))
    remedy = _SAME_FUNCTION
    if given:  # which may be why, or be as it is meant
        remedy = f"{both(*given)}; {_SAME_FUNCTION}, and {_SAME_KINDS}"
    if place is None:
        counted = both("the step has", f"{len(lines)} operations", str(len(others)))
        return f"{counted}; {remedy}"
    mine, theirs = lines[place], others[place]
    if argument := _differing(_arguments([mine]), _arguments([theirs])):
        return f"{both(*argument)}; {_SAME_KINDS}"
    if _without_keys(mine.words) == _without_keys(theirs.words):
        remedy = _SAME_DRAWS
    shown = [f"{line.full or line.words} ({line.source})" for line in (mine, theirs)]
    return f"{both(f'operation {place} of the step is', *shown)}; {remedy}"


def _is_argument(line: Line) -> bool:
    return line.words.startswith("placeholder(")


def _arguments(lines: Iterable[Line]) -> dict[str, str]:
    """Give the type of each argument, and the shape of its rows."""
    found: dict[str, str] = {}
    for line in filter(_is_argument, lines):
        name, _, kind = line.full.partition(": ")
        found.setdefault(name, kind)  # those of a scan's body come later
    return found


def _differing(mine: dict[str, str], theirs: dict[str, str]) -> tuple[str, str, str] | None:
    """Find the first argument that is not of one kind; what both ranks lack or have is no news."""
    for name, kind in mine.items():
        if theirs.get(name, kind) != kind:
            return f"{name} of the step is", kind, theirs[name]
    return None


def _without_keys(words: str) -> str:
    """Leave out what an operator makes its random numbers of: seed, operator and draws before."""
    return re.sub(r"\bkey=\d+", "", words)


def _numbers(graph: Graph, ends: Iterable[int]) -> dict[int, int]:
    """Number some nodes and what they depend on, in the order of their recording."""
    wanted = set(ends)
    for node in reversed(graph.nodes):
        if node.id in wanted:
            wanted.update(node.inputs)
    return {old: new for new, old in enumerate(sorted(wanted))}


def _lines(graph: Graph, numbers: dict[int, int]) -> Iterator[Line]:
    """Say what the numbered operations do, and behind each scan what it does in a step."""
    asked: dict[int, set[int]] = {}
    for i in numbers:
        if graph.nodes[i].op == "scan_result":
            asked.setdefault(graph.nodes[i].inputs[0], set()).add(graph.nodes[i].attrs["index"])
    for i in numbers:
        node = graph.nodes[i]
        yield Line(_words(graph, node, numbers), node.source, _full(graph, node, numbers))
        if node.op == "scan":
            yield from _step(node, asked.get(i, set()))


def _step(scan: Node, asked: Collection[int]) -> Iterator[Line]:
    """Say what a scan's step does for the next carry, and for the results that are asked for."""
    body: Body = scan.attrs["body"]
    results = [*range(body.carries), *body.made]
    ends = {
        result: i
        for result, i in zip(results, body.graph.outputs, strict=True)
        if result < body.carries or result in asked
    }
    numbers = _numbers(body.graph, ends.values())
    yield from _lines(body.graph, numbers)
    given = ", ".join(f"{result}=%{numbers[i]}" for result, i in ends.items())
    yield Line(f"the end of a step of scan({given})", scan.source)


def _full(graph: Graph, node: Node, numbers: dict[int, int]) -> str:
    """Say what the words leave out; empty where that is nothing."""
    if node.op == "placeholder":
        shape = ("rows", *node.spec.shape[1:]) if node.spec.shape else ()
        return f"{node.attrs['name']}: {node.spec.dtype} {show(shape)}"
    return _words(graph, node, numbers, full=True) if node.op in _OF_VARIABLES else ""


def _words(graph: Graph, node: Node, numbers: dict[int, int], full: bool = False) -> str:
    reads = [f"%{numbers[i]}" for i in node.inputs]
    told = ((key, _without_sizes(value)) for key, value in sorted(node.attrs.items()))
    said = [f"{key}={value!r}" for key, value in told if _is_said(key, value)]
    if node.op in _OF_VARIABLES:
        name = node.attrs["variable"].name
        said = [repr(name if full else own_part(name))]
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
    """Leave out what "same" padding makes of the sizes of images, which may be a rank's own."""
    if not isinstance(value, Windows):
        return value
    around = zip(value.strides, value.before, value.after, strict=True)
    padding = ["same" if value.same and each[0] > 1 else each[1:] for each in around]
    return f"{value.size} strides={value.strides} dilation={value.dilation} padding={padding}"


def _is_said(key: str, value: Any) -> bool:
    return key in _PLACES or isinstance(value, str | bool | float)
