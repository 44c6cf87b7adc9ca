"""How long a frame's instructions take: noted of collectives, reported of all to who listens."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from allreduce import events
from allreduce.comm import Work
from allreduce.devices import options
from allreduce.graph.core.node import Node, blame
from allreduce.graph.core.op_table import lookup
from allreduce.graph.schedule.program import Instruction
from allreduce.graph.schedule.streams import COLLECTIVE, COMPUTE, StreamName, stream_of

if TYPE_CHECKING:
    from allreduce.graph.execute.bound_program import Frame

Step = Callable[[], None]


@dataclass(slots=True)
class Clock:
    """When a collective was on its way (`time.perf_counter()` seconds).

    Attributes:
        started: It began.
        awaited: Somebody began to wait for it.
        over: Nobody waited for it any more; it may have been over before that.
        early: Whether it was complete when the replica first waited for anything after its start;
            None before that.
    """

    started: float
    awaited: float = 0.0
    over: float = 0.0
    early: bool | None = None

    @property
    def exposed(self) -> float:
        """The seconds that the replica waited for it."""
        return self.over - self.awaited


@dataclass(frozen=True, slots=True)
class Took:
    """When a step began and ended, and its collectives, by node."""

    began: float
    ended: float
    clocks: Mapping[int, Clock]


@dataclass(frozen=True, slots=True)
class Fed:
    """How long the batch of a step took to be made, and how long the step waited for it.

    Both in seconds. What it did not wait for was hidden behind other steps.
    """

    made: float
    waited: float


class Recent:
    """How long the latest steps took, in seconds, with pipelining (True) and without (False)."""

    _KEPT = 64

    def __init__(self) -> None:
        self._steps = deque[tuple[bool, float]](maxlen=self._KEPT)

    def note(self, took: Took) -> Took:
        """Keep how long one step took."""
        self._steps.append((options.current().pipelining, took.ended - took.began))
        return took

    def seconds(self, how: bool) -> list[float]:
        """Give those with pipelining, or those without."""
        return [seconds for each, seconds in self._steps if each is how]

    def shares(self) -> list[float]:
        """Divide each step with pipelining by a neighbour without: all else was alike."""
        return [
            one / other if how else other / one
            for (how, one), (next_how, other) in itertools.pairwise(self._steps)
            if how is not next_how
        ]


def timed(frame: Frame, node: Node, step: Step) -> Step:
    """Return the step that starts a collective, with a note of when it did.

    Without pipelining it is over when the step is.
    """

    def run() -> None:
        frame.clocks[node.id] = Clock(time.perf_counter())
        try:
            step()
        except Exception as error:
            blame(error, node)
            raise
        if not options.current().pipelining:
            frame.end(node.id)

    return run


def wait_for(frame: Frame, node: Node, work: Work) -> None:
    """Wait for a collective; report the wait, and the collective, if somebody listens."""
    clock = frame.clocks[node.id]
    clock.awaited = time.perf_counter()
    for each, begun in (*frame.works.items(), (node.id, work)):
        # A wait for one may go on with all, so that a later one does not tell.
        if frame.clocks[each].early is None:
            frame.clocks[each].early = begun.settled
    try:
        work.wait()
    except Exception as error:  # it comes late, and the traceback does not lead to who started it
        blame(error, node)
        raise
    clock.over = time.perf_counter()
    if events.heard():
        stream = stream_of(node)._replace(kind=COMPUTE)  # which waits
        fields = {**_fields(frame, node, stream), "step": frame.moment.step}
        events.report(f"wait for {node.op}", clock.awaited, clock.exposed, fields)
        fields = {**fields, "stream": COLLECTIVE, "exposed": clock.exposed}
        events.report(node.op, clock.started, clock.over - clock.started, fields)


def reported(frame: Frame, instruction: Instruction, step: Step) -> Step:
    """Return the step of an instruction with a report; of a collective it is its start."""
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
        events.report(name, start, seconds, {**fields, "step": frame.moment.step})

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
    """Count the bytes of a collective's result, or of a transfer's, in a frame's steps."""
    if "bucket" not in node.attrs:
        return prod(frame.shape(node)) * node.spec.dtype.itemsize
    bucket = node.attrs["bucket"]
    return int((bucket.stop - bucket.start) * frame.arena(node).layout.dtype.itemsize)
