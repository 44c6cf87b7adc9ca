"""What a frame reports of its instructions while somebody listens: how long each took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allreduce import events
from allreduce.graph.node import Node
from allreduce.graph.program import Instruction

if TYPE_CHECKING:
    from allreduce.graph.frame import Frame


def reported(
    frame: Frame, instruction: Instruction, step: Callable[[], None]
) -> Callable[[], None]:
    """Return the step of an instruction with a report; of a collective it notes the start."""
    node, asynchronous = instruction.node, instruction.stream == "collective"
    name = f"start {node.op}" if asynchronous else node.op
    fields = _fields(frame, node, "compute")

    def run() -> None:
        start = time.perf_counter()
        if asynchronous:
            frame.started[node.id] = start
        step()
        seconds = time.perf_counter() - start
        events.report(name, start, seconds, {**fields, "step": frame.moment.step})

    return run


def reported_wait(frame: Frame, node: Node, wait: Callable[[], object]) -> None:
    """Wait for a collective; report the wait, and the collective from its start to here at most."""
    start = time.perf_counter()
    wait()
    end = time.perf_counter()
    events.report(f"wait for {node.op}", start, end - start, _fields(frame, node, "compute"))
    begun = frame.started.pop(node.id, start)
    fields = {**_fields(frame, node, "collective"), "exposed": end - start}
    events.report(node.op, begun, end - begun, fields)


def _fields(frame: Frame, node: Node, stream: str) -> dict[str, Any]:
    fields = {
        "replica": frame.replica.id,
        "step": frame.moment.step,
        "stream": stream,
        "device": node.device.local if node.device else "",
        "part": node.part,
        "line": node.source,
    }
    if "bucket" in node.attrs:
        bucket = node.attrs["bucket"]
        size = (bucket.stop - bucket.start) * frame.arena(node).layout.dtype.itemsize
        fields.update(bucket=bucket.index, bytes=size)
    return fields
