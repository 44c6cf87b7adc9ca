"""Wait for collectives; report how long each instruction takes, and check its value for NaN."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from allreduce import events
from allreduce.comm import Work
from allreduce.comm.arguments.arrays import dtype_named
from allreduce.devices import COLLECTIVE, Stream, options
from allreduce.graph.core import numerics
from allreduce.graph.core.node import Node, blame
from allreduce.graph.core.op_table import lookup
from allreduce.graph.execute.frame import Frame, Step
from allreduce.graph.execute.timing import Clock
from allreduce.graph.schedule.program import Instruction
from allreduce.graph.schedule.streams import COMPUTE, StreamName, stream_of
from allreduce.reduction import slice_of


def timed(frame: Frame, node: Node, step: Step) -> Step:
    """Return `step`, which starts a collective, so that it also records the start time.

    Without pipelining, and in a first step that loads kernels, it also waits for the collective.
    """

    def run() -> None:
        frame.clocks[node.id] = Clock(time.perf_counter())
        try:
            step()
        except Exception as error:
            blame(error, node)
            raise
        if frame.serial or not options.current().pipelining:
            end(frame, node.id)

    return run


def end(frame: Frame, collective: int) -> None:
    """Wait for a collective, unless it has been awaited already."""
    if collective not in frame.works:
        return
    for each in _ended_with(frame, collective):
        wait_for(frame, frame.facts.nodes[each], frame.works.pop(each))
        if each in frame.received:
            frame.received[each]()
        if frame.watches:
            check_value(frame, frame.facts.nodes[each])


def _ended_with(frame: Frame, collective: int) -> list[int]:
    """List the started collectives whose end is to be handled when one ends; it comes last.

    Collectives end in the order in which they started. A reader of an earlier one does not wait for
    it again, so an earlier one that is checked or received is handled now.
    """
    if not frame.watches and not frame.received:
        return [collective]
    started = list(frame.works)
    earlier = started[: started.index(collective)]
    return [*(each for each in earlier if frame.watches or each in frame.received), collective]


def order(frame: Frame, collective: int, stream: Stream | None) -> None:
    """Have a stream wait for a collective, unless something needs the host to wait.

    Args:
        stream: The stream that reads its result; None if the host does.
    """
    if stream is None or events.has_subscribers():
        end(frame, collective)
    elif collective in frame.works:
        for each in _ended_with(frame, collective):
            work, clock = frame.works[each], frame.clocks[each]
            if clock.early is None:
                clock.early = work.settled
                clock.awaited = clock.over = time.perf_counter()
            work.synchronize(stream)
            if each in frame.received:  # once, on that stream
                del frame.works[each]
                frame.received[each]()


def wait_for(frame: Frame, node: Node, work: Work) -> None:
    """Wait for a collective; report the wait and the collective to subscribers."""
    clock = frame.clocks[node.id]
    clock.awaited = time.perf_counter()
    for each, begun in (*frame.works.items(), (node.id, work)):
        # Waiting for one collective may complete others, so record this before the wait.
        if frame.clocks[each].early is None:
            frame.clocks[each].early = begun.settled
    try:
        work.wait()
    except Exception as error:  # raised late: the traceback does not show the start
        blame(error, node)
        raise
    clock.over = time.perf_counter()
    if events.has_subscribers():
        stream = stream_of(node)._replace(kind=COMPUTE)  # the stream that waits
        fields = {**_fields(frame, node, stream), "step": frame.info.step}
        events.report(f"wait for {node.op}", clock.awaited, clock.exposed, fields)
        fields = {**fields, "stream": COLLECTIVE, "exposed": clock.exposed}
        events.report(node.op, clock.started, clock.over - clock.started, fields)


def reported(frame: Frame, instruction: Instruction, step: Step) -> Step:
    """Return `step` so that it also reports its duration; for a collective, that of its start."""
    node = instruction.node
    stream = instruction.stream
    asynchronous = stream.kind == COLLECTIVE
    name = str(node.attrs.get("chain", node.op))
    name = f"start {name}" if asynchronous else name
    fields = _fields(frame, node, stream._replace(kind=COMPUTE) if asynchronous else stream)

    def run() -> None:
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        events.report(name, start, seconds, {**fields, "step": frame.info.step})

    return run


def _fields(frame: Frame, node: Node, stream: StreamName) -> dict[str, Any]:
    fields = {
        "replica": frame.replica.id,
        "stream": stream.kind,
        "device": stream.device.local,
        "part": node.part,
        "line": node.source,
        "node": node.id,
    }
    if "bucket" in node.attrs:
        fields.update(bucket=node.attrs["bucket"].index)
    if "bucket" in node.attrs or lookup(node.op).kind in ("collective", "transfer"):
        fields.update(bytes=nbytes_of(frame, node))
    return fields


def nbytes_of(frame: Frame, node: Node) -> int:
    """Return the bytes of a collective's or a transfer's result in a frame's steps."""
    if "bucket" not in node.attrs:
        return prod(frame.shape(node)) * node.spec.dtype.itemsize
    bucket, wire = node.attrs["bucket"], node.attrs.get("wire")
    dtype = dtype_named(wire) if wire else frame.arena(node).layout.dtype
    return int((bucket.stop - bucket.start) * dtype.itemsize)


def watched(frame: Frame, node: Node, step: Callable[[], None]) -> Callable[[], None]:
    """Return `step` so that it checks its value; collectives are checked when they end."""
    if node.op == "update_bucket":
        check = check_parameters
    elif lookup(node.op).kind == "compute" and lookup(node.op).view is None:
        check = check_value
    else:
        return step

    def run_and_check() -> None:
        step()
        check(frame, node)

    return run_and_check


def check_value(frame: Frame, node: Node) -> None:
    """Raise an error if the value of an operation or an ended collective is not finite."""
    if node.op == "all_reduce_norm":  # of sums that were looked at
        return
    if "bucket" not in node.attrs:
        inputs = [frame.values[i] for i in node.inputs]
        numerics.check(node.op, node.source, frame.values[node.id], inputs, _when(frame))
        return
    if node.op != "all_gather_bucket":
        for name, gradient in _sums(frame, node):
            what = f"the sum of all replicas' gradients of {name!r}"
            numerics.check(what, node.source, gradient, [], _when(frame))
    if node.op in ("all_gather_bucket", "update_slices"):
        check_parameters(frame, node)


def _sums(frame: Frame, node: Node) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names of a bucket's variables, and the parts whose sums this replica has."""
    arena, bucket = frame.arena(node), node.attrs["bucket"]
    sums, own, first = arena.gradients, slice(bucket.start, bucket.stop), 0
    if node.op != "all_reduce_bucket":
        own = slice_of(bucket, arena.layout, frame.communicator.size, frame.communicator.rank)
    if node.op == "reduce_scatter_bucket":  # these lie by themselves
        sums, first = arena.sums[bucket.index], own.start
    for span in arena.layout.spans[bucket.first : bucket.last]:
        low, high = max(own.start, span.start), min(own.stop, span.start + span.size)
        if low < high:
            part = sums[low - first : high - first]
            yield span.name, part.reshape(span.shape) if part.size == span.size else part


def check_parameters(frame: Frame, node: Node) -> None:
    """Raise an error if parameters are not finite after an update."""
    arena, bucket = frame.arena(node), node.attrs["bucket"]
    for place in range(bucket.first, bucket.last):
        what = f"the update of {arena.layout.spans[place].name!r}"
        parameters = arena.view(arena.parameters, place)
        gradient = arena.view(arena.gradients, place)
        numerics.check(what, node.source, parameters, [gradient], _when(frame))


def _when(frame: Frame) -> str:
    return f"replica {frame.replica.id}, step {frame.info.step}"
