"""Instructions of sharded updates: each member updates its slice of a bucket.

In memory that all members map, one instruction sums a slice up, updates it and stores it for all.
Over other transports these are three: a reduce_scatter, the update and an all_gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from allreduce.comm import Communicator
from allreduce.comm.fused_update import update_init
from allreduce.devices import options
from allreduce.graph.core.node import Node
from allreduce.graph.update.step_checksum import begin_update
from allreduce.graph.update.zero_update import Slices
from allreduce.reduction import Way, slice_of

if TYPE_CHECKING:
    from allreduce.graph.execute.bound_program import Frame

Step = Callable[[], None]


def update_slices(frame: Frame, node: Node) -> Step:
    """Return what starts the update of a bucket by all members, each of its own slice."""
    plan, bucket, rule = (node.attrs[name] for name in ("plan", "bucket", "rule"))
    arena, communicator = frame.arena(node), frame.replica.communicator
    assert communicator is not None, "a single replica has no collectives"
    part, header = slice(bucket.start, bucket.stop), arena.gradients[: arena.layout.header]
    slots = {name: array[part] for name, array in arena.slots.items()}
    native = rule.native(header, slots)
    gradients, parameters = arena.gradients[part], arena.parameters[part]
    start = update_init(communicator, gradients, parameters, native.update, (header, slots))
    keeps, summed = options.current().check_numerics, _header_of(frame, node)

    def run() -> None:
        if arena.loaded:
            frame.end(summed)  # until then, others may look at what they are to find here
            plan.settle(arena)
        stamp = frame.stamps.get(id(plan))
        native.prepare(arena.number)
        native.update.expect(b"" if stamp is None else stamp.sums, keeps)
        frame.works[node.id] = start()

    return run


def own_sums(frame: Frame, node: Node) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names of a bucket's variables, and what this member has summed up of each."""
    arena, communicator, bucket = (
        frame.arena(node),
        frame.replica.communicator,
        node.attrs["bucket"],
    )
    assert communicator is not None, "a single replica has no collectives"
    own = slice_of(bucket, arena.layout, communicator.size, communicator.rank)
    for span in arena.layout.spans[bucket.first : bucket.last]:
        low, high = max(own.start, span.start), min(own.stop, span.start + span.size)
        if low < high:
            yield span.name, arena.gradients[low:high]


def _header_of(frame: Frame, node: Node) -> int:
    """Find what reduces the header of an update's arena."""
    made = (each.node for each in frame.program.instructions)
    return next(
        each.id
        for each in made
        if each.op == "all_reduce_bucket"
        and each.attrs["plan"] is node.attrs["plan"]
        and each.attrs["bucket"].has_header
    )


def reduce_scatter_bucket(frame: Frame, node: Node) -> Step:
    """Return what starts to sum a bucket up, each slice where it is updated."""
    arena, slices, communicator = frame.arena(node), _slices(frame, node), _members(frame)
    gradients, sums = arena.gradients[slices.whole], arena.sums[node.attrs["bucket"].index]

    def run() -> None:
        frame.works[node.id] = communicator.reduce_scatter(
            gradients, counts=slices.counts, out=sums, async_op=True
        )

    return run


def update_own(frame: Frame, node: Node) -> Step:
    """Return the update of the own slice."""
    arena, rule, bucket = frame.arena(node), node.attrs["rule"], node.attrs["bucket"]
    own, count, stamp = _slices(frame, node).own, arena.count, frame.stamp(node)
    scattered = node.attrs["way"] is Way.SCATTERED
    sums = arena.sums[bucket.index] if scattered else arena.gradients[own]
    parameters = arena.parameters[own]
    slots = {name: array[own] for name, array in arena.slots.items()}

    def run() -> None:
        begin_update(arena, stamp, bucket.has_header)
        rule.update(parameters, sums, slots, count, arena.iterations)

    return run


def all_gather_bucket(frame: Frame, node: Node) -> Step:
    """Return what starts to give all members a bucket's new parameters."""
    arena, slices, communicator = frame.arena(node), _slices(frame, node), _members(frame)
    parameters, own = arena.parameters[slices.whole], arena.parameters[slices.own]

    def run() -> None:
        frame.works[node.id] = communicator.all_gather(
            own, counts=slices.counts, out=parameters, async_op=True
        )

    return run


def scattered_sums(frame: Frame, node: Node) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names of a bucket's variables, and what this member has summed up of each."""
    arena, bucket, own = frame.arena(node), node.attrs["bucket"], _slices(frame, node).own
    sums = arena.sums[bucket.index]
    for span in arena.layout.spans[bucket.first : bucket.last]:
        low, high = max(own.start, span.start), min(own.stop, span.start + span.size)
        if low < high:
            yield span.name, sums[low - own.start : high - own.start]


def _slices(frame: Frame, node: Node) -> Slices:
    """Return the slices of an instruction's bucket."""
    return Slices(node.attrs["bucket"], frame.arena(node).layout, _members(frame))


def _members(frame: Frame) -> Communicator:
    assert frame.replica.communicator is not None, "a single replica has no collectives"
    return frame.replica.communicator
