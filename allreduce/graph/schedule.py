"""Scheduling: a placed and partitioned graph becomes a program."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from allreduce.graph.node import Graph, Node
from allreduce.graph.ops.base import lookup
from allreduce.graph.program import STREAMS, Instruction, Program

GIVEN = ("placeholder", "constant", "runtime")
# A ready node of a lower class is issued first: what others are waiting for, then the rest in the
# order in which it was recorded, and last what waits for other replicas.
_FIRST = (
    *("store_gradient", "store_count", "send"),
    *("all_reduce_bucket", "reduce_scatter_bucket", "update_slices", "all_gather_bucket"),
)
_LAST = ("update_bucket", "update_own")


def schedule(graph: Graph) -> Program:
    """Order a graph's nodes over streams, with the fewest events that keep them correct."""
    given = {node.id: node for node in graph.nodes if node.op in GIVEN}
    outputs = tuple(graph.nodes[i] for i in graph.outputs)
    program = Program(bind(_order(graph, given), given), given, graph.inputs, outputs)
    program.check()
    return program


def bind(order: Iterable[Node], given: Mapping[int, Node]) -> tuple[Instruction, ...]:
    """Put nodes on streams in the order of their issue, with the events that they need."""
    issued = [node for node in order if node.id not in given]
    waits = _events(issued)
    awaited = {i for each in waits for i in each}
    return tuple(
        Instruction(node, _stream(node), waits[index], index in awaited)
        for index, node in enumerate(issued)
    )


def _stream(node: Node) -> str:
    kind = lookup(node.op).kind
    return kind if kind in STREAMS else "compute"


def _order(graph: Graph, given: dict[int, Node]) -> list[Node]:
    """Sort topologically; among ready nodes by class, then as recorded."""
    after: dict[int, list[int]] = {node.id: [] for node in graph.nodes}
    missing: dict[int, int] = {}
    for node in graph.nodes:
        before = {i for i in node.before if i not in given}
        missing[node.id] = len(before)
        for i in before:
            after[i].append(node.id)
    ready = [_rank(node) for node in graph.nodes if not missing[node.id] and node.id not in given]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(graph.nodes[number])
        for following in after[number]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, _rank(graph.nodes[following]))
    return order


def _rank(node: Node) -> tuple[int, int]:
    return (0 if node.op in _FIRST else 2 if node.op in _LAST else 1), node.id


def _events(order: list[Node]) -> list[tuple[int, ...]]:
    """Choose which instructions of other streams each one waits for.

    Streams run in order, so waiting for an instruction covers all before it on its stream, and all
    that those waited for: a vector clock per stream tells what is covered already.
    """
    place = {node.id: index for index, node in enumerate(order)}
    clocks = {stream: dict.fromkeys(STREAMS, -1) for stream in STREAMS}
    then: list[dict[str, int]] = []
    waits: list[tuple[int, ...]] = []
    for index, node in enumerate(order):
        stream = _stream(node)
        clock = clocks[stream]
        chosen = []
        for i in sorted((place[i] for i in node.before if i in place), reverse=True):
            origin = _stream(order[i])
            if origin != stream and clock[origin] < i:
                chosen.append(i)
                for each, covered in then[i].items():
                    clock[each] = max(clock[each], covered)
        clock[stream] = index
        then.append(dict(clock))
        waits.append(tuple(sorted(chosen)))
    return waits
