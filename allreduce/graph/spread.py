"""Buckets that are updated in slices over any transport: summed, updated and gathered by turns.

Each member has the slots of its own slices alone, until all of them bring these together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from allreduce.comm import Communicator
from allreduce.errors import UsageError
from allreduce.graph.node import Node
from allreduce.graph.stamp import begin_update
from allreduce.reduction import Arena, Bucket, Layout, Way, slice_of

if TYPE_CHECKING:
    from allreduce.graph.frame import Frame

Step = Callable[[], None]


class Slices:
    """Whose slice of a bucket is where.

    Args:
        bucket: As its arena has it, or without its header.
        layout: Of the arena.
        communicator: Has one member per replica.
    """

    def __init__(self, bucket: Bucket, layout: Layout, communicator: Communicator) -> None:
        size = communicator.size
        each = [slice_of(bucket, layout, size, member) for member in range(size)]
        self.whole = slice(bucket.parameters_start, bucket.stop)
        self.own = each[communicator.rank]
        self.counts = [part.stop - part.start for part in each]

    @classmethod
    def of(cls, frame: Frame, node: Node) -> Slices:
        """Return those of an instruction's bucket."""
        return cls(node.attrs["bucket"], frame.arena(node).layout, _members(frame))


def choose_way(communicator: Communicator, layout: Layout, bucket: Bucket) -> Way:
    """Choose how members that cannot reach into each other's memory add a bucket up.

    A reduce_scatter moves fewer bytes. It gives an all_reduce's bits where two are added, and where
    both go round the same ring in the same slices. The header is then to go round with its bucket:
    alone, a count of fractions would be added up in another order.
    """
    if communicator.size == 2:
        return Way.SCATTERED
    if bucket.has_header:
        return Way.SUMMED
    counts = Slices(bucket, layout, communicator).counts
    gradients = np.empty(sum(counts), layout.dtype)
    ways = {
        communicator.plan("all_reduce", gradients).algorithm,
        communicator.plan("reduce_scatter", gradients, counts=counts).algorithm,
    }
    rings = communicator.transport == "tcp" and ways == {"chain"}
    return Way.SCATTERED if rings else Way.SUMMED


def reduce_scatter_bucket(frame: Frame, node: Node) -> Step:
    """Return what starts to sum a bucket up, each slice where it is updated."""
    arena, slices, communicator = frame.arena(node), Slices.of(frame, node), _members(frame)
    gradients, sums = arena.gradients[slices.whole], arena.sums[node.attrs["bucket"].index]

    def run() -> None:
        frame.works[node.id] = communicator.reduce_scatter(
            gradients, counts=slices.counts, out=sums, async_op=True
        )

    return run


def update_own(frame: Frame, node: Node) -> Step:
    """Return the update of the own slice."""
    arena, rule, bucket = frame.arena(node), node.attrs["rule"], node.attrs["bucket"]
    own, count, stamp = Slices.of(frame, node).own, arena.count, frame.stamp(node)
    scattered = node.attrs["way"] is Way.SCATTERED
    sums = arena.sums[bucket.index] if scattered else arena.gradients[own]
    parameters = arena.parameters[own]
    slots = {name: array[own] for name, array in arena.slots.items()}

    def run() -> None:
        begin_update(arena, stamp, bucket.has_header)
        rule.update(parameters, sums, slots, count, arena.iterations)

    return run


def _members(frame: Frame) -> Communicator:
    assert frame.replica.communicator is not None, "a single replica has no collectives"
    return frame.replica.communicator


def all_gather_bucket(frame: Frame, node: Node) -> Step:
    """Return what starts to give all members a bucket's new parameters."""
    arena, slices, communicator = frame.arena(node), Slices.of(frame, node), _members(frame)
    parameters, own = arena.parameters[slices.whole], arena.parameters[slices.own]

    def run() -> None:
        frame.works[node.id] = communicator.all_gather(
            own, counts=slices.counts, out=parameters, async_op=True
        )

    return run


def scattered_sums(frame: Frame, node: Node) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names of a bucket's variables, and what this member has summed up of each."""
    arena, bucket, own = frame.arena(node), node.attrs["bucket"], Slices.of(frame, node).own
    sums = arena.sums[bucket.index]
    for span in arena.layout.spans[bucket.first : bucket.last]:
        low, high = max(own.start, span.start), min(own.stop, span.start + span.size)
        if low < high:
            yield span.name, sums[low - own.start : high - own.start]


def spread_error() -> UsageError:
    """Say that this process does not have an optimizer's slots."""
    return UsageError(
        "each rank has its own slices of this optimizer's slots alone, as "
        "ar.config.set_shard_everywhere(True) has them updated so; call optimizer.consolidate() on "
        "every rank, behind the last step, and then save, or ask for its state, on any of them "
        "(what a rank had that is gone is gone, too; model.save_weights saves the rest)"
    )


def gather_slots(communicator: Communicator, arena: Arena, buckets: Sequence[Bucket]) -> None:
    """Give a member what all have of the slots; all members do so together."""
    for bucket in buckets:
        slices = Slices(bucket, arena.layout, communicator)
        for array in arena.slots.values():
            out = array[slices.whole]
            communicator.all_gather(array[slices.own], counts=slices.counts, out=out)


def joined_slots(arenas: Sequence[Arena], buckets: Sequence[Bucket]) -> dict[str, np.ndarray]:
    """Copy the slots of all members, where all are in this process."""
    found = {name: array.copy() for name, array in arenas[0].slots.items()}
    for bucket in buckets:
        for member, arena in enumerate(arenas):
            part = slice_of(bucket, arena.layout, len(arenas), member)
            for name, array in arena.slots.items():
                found[name][part] = array[part]
    return found
