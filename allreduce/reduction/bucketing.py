"""Buckets: ranges of an arena whose gradients are reduced by one collective.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB
2020), section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from allreduce.reduction.arena import Layout

# Large enough that a collective's fixed cost (a few microseconds) vanishes, small enough that the
# first starts early and that a bucket's update finds its gradients in the cache.
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `stop` of the gradients, holding the spans `first` to `last` (exclusive).

    The first bucket starts with the header, unless that goes by itself. `parameters_start` is where
    its parameters start.
    """

    index: int
    first: int
    last: int
    start: int
    stop: int
    parameters_start: int

    @property
    def has_header(self) -> bool:
        """Whether the header is a part of it."""
        return self.start < self.parameters_start

    def without_header(self) -> Bucket:
        """Return the bucket of its parameters alone."""
        return replace(self, start=self.parameters_start)


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


def header_alone(layout: Layout) -> Bucket:
    """Return a bucket of the header alone, for gradients of which no bucket is to wait for it."""
    return Bucket(0, 0, 0, 0, layout.header, layout.header)


def _end(layout: Layout, index: int) -> int:
    return layout.size if index + 1 == len(layout.spans) else layout.spans[index + 1].start
