"""Buckets that are updated in slices over any transport: summed, updated and gathered by turns.

Each member has the slots of its own slices alone, until all of them bring these together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allreduce.comm import Communicator
from allreduce.errors import UsageError
from allreduce.reduction import Arena, Bucket, Layout, Way, slice_of


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
