"""Which buckets are updated in slices, and which part of a bucket is whose slice.

Every member updates its own slice of parameters and slots, and gives all others the new parameters:
slots are then valid in own slices only.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(SC 2020), section 5.1, where slices of the optimizer's state are all that a member keeps.
"""

from __future__ import annotations

from enum import Enum

from allreduce import _native
from allreduce.reduction.arena import Layout
from allreduce.reduction.bucketing import Bucket

# Bytes of parameters from which on a bucket is updated in slices. Adam, 2 processes, Zen 3, whole
# steps of one variable, the plain way and this one in turn: 256 KiB 240 us and 258, 512 KiB 301 and
# 299, 1 MiB 434 and 411, 4 MiB 1.64 ms and 1.27; 20 of 4 MB 51 ms and 36. The calls alone: 256 KiB
# 84 us and 60, 1 MiB 219 and 144, 80 MB 33 ms and 19. What small ones gain is lost again, as the
# header goes by itself.
SHARDED_BYTES = 512 << 10


class ShardMode(Enum):
    """How a bucket is updated in slices.

    MAPPED: in one collective, in which members reach into each other's memory.
    SCATTERED: reduce_scatter, the own update, all_gather.
    SUMMED: all_reduce, the own update, all_gather, where a reduce_scatter need not add as it does.
    """

    MAPPED = "mapped"
    SCATTERED = "scattered"
    SUMMED = "summed"


def is_large(bucket: Bucket, layout: Layout) -> bool:
    """Say whether a bucket is worth being updated in slices."""
    count = bucket.stop - bucket.parameters_start
    return count * layout.dtype.itemsize >= SHARDED_BYTES


def slice_of(bucket: Bucket, layout: Layout, size: int, member: int) -> slice:
    """Return which elements of the arena one of `size` members updates in a bucket."""
    count = bucket.stop - bucket.parameters_start
    low, high = _native.slice_bounds(count, layout.dtype.itemsize, size, member)
    return slice(bucket.parameters_start + low, bucket.parameters_start + high)
