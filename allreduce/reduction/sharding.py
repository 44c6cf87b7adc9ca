"""Sharded updates: which buckets are sharded, and which slice each member updates.

Every member updates its slice of parameters and slots, and sends the new parameters to all others.
Slots are then valid in the own slices only.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(SC 2020), section 5.1, where members store only slices of the optimizer's state.
"""

from __future__ import annotations

from enum import Enum

from allreduce import _native
from allreduce.reduction.arena import Layout
from allreduce.reduction.bucketing import Bucket

# Bytes of parameters from which on a bucket gets a sharded update. Adam, 2 processes, Zen 3, whole
# steps of one variable, without and with sharding: 256 KiB 240 us and 258, 512 KiB 301 and 299, 1
# MiB 434 and 411, 4 MiB 1.64 ms and 1.27; 20 of 4 MB 51 ms and 36. The calls alone: 256 KiB 84 us
# and 60, 1 MiB 219 and 144, 80 MB 33 ms and 19. The gain of small ones is lost again, because the
# header is a separate bucket.
SHARDED_BYTES = 512 << 10


class ShardMode(Enum):
    """How a bucket's update is sharded.

    MAPPED: one collective, in which members access each other's memory; or two, of which the first
    one sums, if gradients are clipped by their norm.
    SCATTERED: reduce_scatter, update of the own slice, all_gather.
    SUMMED: all_reduce, update of the own slice, all_gather; used if a reduce_scatter could round
    differently.
    """

    MAPPED = "mapped"
    SCATTERED = "scattered"
    SUMMED = "summed"


def is_large(bucket: Bucket, layout: Layout) -> bool:
    """Return whether a bucket is large enough for a sharded update."""
    count = bucket.stop - bucket.parameters_start
    return count * layout.dtype.itemsize >= SHARDED_BYTES


def slice_of(bucket: Bucket, layout: Layout, size: int, member: int) -> slice:
    """Return the elements of the arena that one of `size` members updates in a bucket."""
    count = bucket.stop - bucket.parameters_start
    low, high = _native.slice_bounds(count, layout.dtype.itemsize, size, member)
    return slice(bucket.parameters_start + low, bucket.parameters_start + high)
