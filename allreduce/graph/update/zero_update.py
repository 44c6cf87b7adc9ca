"""Sharded updates over any transport: reduce_scatter, update and all_gather.

Each member has the slots of its own slices only, until `consolidate` gathers them. Source:
Rajbhandari et al., ZeRO: Memory optimizations toward training trillion parameter models (SC 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allreduce.comm import Communicator
from allreduce.errors import UsageError
from allreduce.reduction import Arena, Bucket, Layout, ShardMode, slice_of


class Slices:
    """The slices of a bucket, one per member.

    Args:
        bucket: The bucket, with or without its header.
        layout: The arena's layout.
        communicator: The replicas' communicator.
    """

    def __init__(self, bucket: Bucket, layout: Layout, communicator: Communicator) -> None:
        size = communicator.size
        each = [slice_of(bucket, layout, size, member) for member in range(size)]
        self.whole = slice(bucket.parameters_start, bucket.stop)
        self.own = each[communicator.rank]
        self.counts = [part.stop - part.start for part in each]


def choose_mode(communicator: Communicator, layout: Layout, bucket: Bucket) -> ShardMode:
    """Choose how members sum a bucket that each then updates its slice of.

    A reduce_scatter moves fewer bytes. Its results equal an all_reduce's bit for bit with two
    members, in shared memory, and if both use the same ring and slices. Otherwise the header must
    travel with its bucket, or fractional sample counts would be added in another order.
    """
    if communicator.size == 2 or communicator.transport == "shared":
        return ShardMode.SCATTERED
    if bucket.has_header:
        return ShardMode.SUMMED
    counts = Slices(bucket, layout, communicator).counts
    gradients = np.empty(sum(counts), layout.dtype)
    modes = {
        communicator.plan("all_reduce", gradients).algorithm,
        communicator.plan("reduce_scatter", gradients, counts=counts).algorithm,
    }
    rings = communicator.transport == "tcp" and modes == {"chain"}
    return ShardMode.SCATTERED if rings else ShardMode.SUMMED


def spread_error() -> UsageError:
    """Return the error for saving slots that this process does not have."""
    return UsageError(
        "each rank has only its own slices of this optimizer's slots, because of "
        "ar.config.set_shard_everywhere(True); call optimizer.consolidate() on every rank after "
        "the last step, then save or read the state on any rank (the slices of a rank that has "
        "died are lost; model.save_weights saves the weights)"
    )


def gather_slots(communicator: Communicator, arena: Arena, buckets: Sequence[Bucket]) -> None:
    """Gather the slots of all members; all members call this."""
    for bucket in buckets:
        slices = Slices(bucket, arena.layout, communicator)
        for array in arena.slots.values():
            out = array[slices.whole]
            communicator.all_gather(array[slices.own], counts=slices.counts, out=out)


def joined_slots(arenas: Sequence[Arena], buckets: Sequence[Bucket]) -> dict[str, np.ndarray]:
    """Copy the slots of all members, if all are in this process."""
    found = {name: array.copy() for name, array in arenas[0].slots.items()}
    for bucket in buckets:
        for member, arena in enumerate(arenas):
            part = slice_of(bucket, arena.layout, len(arenas), member)
            for name, array in arena.slots.items():
                found[name][part] = array[part]
    return found
