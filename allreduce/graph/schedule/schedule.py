"""Scheduling: convert a placed and partitioned graph to a program."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping

from allreduce.devices import COLLECTIVE
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.schedule.program import Instruction, Program
from allreduce.graph.schedule.streams import StreamName, stream_of

GIVEN = ("placeholder", "constant", "runtime")
# A ready node of a lower class is issued first: nodes that others wait for, then the rest in the
# order of recording, and last nodes that wait for other replicas.
_FIRST = (
    *("store_gradient", "store_count", "send", "fetch"),
    *("all_reduce_bucket", "reduce_scatter_bucket", "sum_slices"),
    *("update_slices", "all_gather_bucket"),
)
_LAST = ("update_bucket", "update_own")


def schedule(graph: Graph) -> Program:
    """Order nodes over streams, with the fewest events that keep them correct."""
    given = {node.id: node for node in graph.nodes if node.op in GIVEN}
    outputs = tuple(graph.nodes[i] for i in graph.outputs)
    program = Program(bind(_order(graph, given), given), given, graph.inputs, outputs)
    program.check()
    return program


def bind(order: Iterable[Node], given: Mapping[int, Node]) -> tuple[Instruction, ...]:
    """Put nodes on streams in the order of issue, with the events that they need."""
    issued = [node for node in order if node.id not in given]
    streams = [stream_of(node) for node in issued]
    waits = _events(issued, streams)
    awaited = {i for each in waits for i in each}
    return tuple(
        Instruction(node, streams[index], waits[index], index in awaited)
        for index, node in enumerate(issued)
    )


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


def _events(order: list[Node], streams: list[StreamName]) -> list[tuple[int, ...]]:
    """Choose the instructions of other streams that each one waits for.

    Streams run in order, so waiting for an instruction covers all earlier ones on its stream and
    all that those waited for. A vector clock per stream records what is covered.
    """
    clocks: dict[StreamName, dict[StreamName, int]] = {stream: {} for stream in streams}
    then: list[dict[StreamName, int]] = []
    waits: list[tuple[int, ...]] = []
    for index, before in enumerate(_before(order, streams)):
        stream = streams[index]
        clock = clocks[stream]
        chosen = []
        for i in sorted(before, reverse=True):
            origin = streams[i]
            if origin != stream and clock.get(origin, -1) < i:
                chosen.append(i)
                for each, covered in then[i].items():
                    clock[each] = max(clock.get(each, -1), covered)
        clock[stream] = index
        then.append(dict(clock))
        waits.append(tuple(sorted(chosen)))
    return waits


def _before(order: list[Node], streams: list[StreamName]) -> Iterator[list[int]]:
    """List the indices of the instructions that must end before each one.

    The host's collectives also end in the order in which they start, on whichever of its devices
    they run. Those of GPUs do so on each GPU only, because each has a stream of its own.
    """
    place = {node.id: index for index, node in enumerate(order)}
    called = None
    for index, node in enumerate(order):
        before = [place[i] for i in node.before if i in place]
        if streams[index].kind == COLLECTIVE and streams[index].device.on_host:
            yield before if called is None else [*before, called]
            called = index
        else:
            yield before
