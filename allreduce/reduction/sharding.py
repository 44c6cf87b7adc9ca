"""Which buckets are updated in slices, and which part of a bucket is whose slice.

Every member adds up its own slice of the gradients, updates its own slice of parameters and slots,
and stores the new parameters in all members' memory: slots are then valid in own slices only.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(SC 2020), section 5.1, where slices of the optimizer's state are all that a member keeps.
"""

from __future__ import annotations

from allreduce.comm.segments import slice_bounds
from allreduce.reduction.arena import Layout
from allreduce.reduction.bucketing import Bucket

# Bytes of parameters from which on a bucket is updated in slices. Adam, 2 processes, Zen 4,
# all-reduce and update, the plain way and this one in turn: 64 KiB 50 us and 41, 256 KiB 84 and 60,
# 1 MiB 219 and 144, 4 MiB 1.28 ms and 0.65 to 0.9, 80 MB 33 ms and 19. Below, what is gained is
# less than what it takes to prepare the call.
SHARDED_BYTES = 256 << 10


def is_large(bucket: Bucket, layout: Layout) -> bool:
    """Say whether a bucket is worth being updated in slices."""
    count = bucket.stop - bucket.parameters_start
    return count * layout.dtype.itemsize >= SHARDED_BYTES


def slice_of(bucket: Bucket, layout: Layout, size: int, member: int) -> slice:
    """Return which elements of the arena one of `size` members updates in a bucket."""
    count = bucket.stop - bucket.parameters_start
    low, high = slice_bounds(count, layout.dtype.itemsize, size, member)
    return slice(bucket.parameters_start + low, bucket.parameters_start + high)
