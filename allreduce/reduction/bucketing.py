"""Buckets: ranges of an arena whose gradients are reduced by one collective.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB
2020), section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from allreduce.reduction.arena import Layout

# Large enough that a collective's fixed cost (a few microseconds) vanishes, small enough that the
# first starts early and that a bucket's update finds its gradients in the cache.
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `stop` of the gradients, holding the spans `first` to `last` (exclusive).

    The first bucket starts with the header. `parameters_start` is where its parameters start.
    """

    index: int
    first: int
    last: int
    start: int
    stop: int
    parameters_start: int


def plan_buckets(layout: Layout, limit: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Cut a layout into buckets of at most `limit` bytes; a larger parameter gets its own."""
    buckets: list[Bucket] = []
    spans = layout.spans
    first = 0
    for index in range(len(spans)):
        last = index + 1
        stop = layout.size if last == len(spans) else spans[last].start
        end_of_next = stop if last == len(spans) else _end(layout, last)
        start = spans[first].start
        if last == len(spans) or (end_of_next - start) * layout.dtype.itemsize > limit:
            begins = 0 if not buckets else start
            buckets.append(Bucket(len(buckets), first, last, begins, stop, start))
            first = last
    return tuple(buckets)


def _end(layout: Layout, index: int) -> int:
    return layout.size if index + 1 == len(layout.spans) else layout.spans[index + 1].start
