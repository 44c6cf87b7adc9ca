"""Check a graph before it is planned: all inputs are fed, and there are no cycles."""

from __future__ import annotations

from collections.abc import Iterator

from allreduce.errors import UsageError
from allreduce.graph.core.node import Graph, Node


def check_order(graph: Graph) -> None:
    """Raise an error if a node needs a later one.

    Raises:
        UsageError: Names both, and the variables whose changes lead from one to the other.
    """
    for node in graph.nodes:
        late = max(node.before, default=-1)
        if late >= node.id:
            names = ", ".join(dict.fromkeys(map(repr, _changed_between(graph, node.id, late))))
            through = f": a cycle through assignments of {names}" if names else ""
            raise UsageError(
                f"{node.source}: {node.op} needs {_shown(graph.nodes[late])}, which comes after "
                f"it{through}; read what an assignment needs before it is made"
            )


def _changed_between(graph: Graph, first: int, last: int) -> Iterator[str]:
    """Yield the names of the variables that are changed on ways from one node to a later one."""
    behind = {first}
    for node in graph.nodes[first + 1 : last + 1]:
        if not behind.isdisjoint(node.before):
            behind.add(node.id)
    needed = {last} & behind
    for node in reversed(graph.nodes[first : last + 1]):
        if node.id in needed:
            needed.update(behind.intersection(node.before))
            yield from (variable.name for variable in node.attrs.get("changes", ()))


def check_fed(graph: Graph) -> None:
    """Raise an error if fetches or effects need a placeholder that is not an input.

    Raises:
        UsageError: Names the fetch, the feed and both lines.
    """
    given = set(graph.inputs)
    lacks: dict[int, int] = {}  # of each node: a placeholder that it needs
    for node in graph.nodes:
        if node.op == "placeholder" and node.id not in given:
            lacks[node.id] = node.id
        else:
            lacks.update((node.id, lacks[i]) for i in node.before if i in lacks)
    for wanted in (*graph.outputs, *graph.effects):
        if wanted in lacks:
            feed = graph.nodes[lacks[wanted]]
            raise UsageError(
                f"{graph.nodes[wanted].source}: {graph.nodes[wanted].op} depends on "
                f"{feed.attrs['name']!r} ({feed.source}), which is not fed; feed it, or a tensor "
                "between the two"
            )


def _shown(node: Node) -> str:
    return f"{node.op} ({node.source})"
