"""Buckets: ranges of an arena whose gradients are reduced by one collective.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB
2020), section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from allreduce.reduction.arena import Layout

# Large enough that a collective's fixed cost (a few microseconds) vanishes, small enough that the
# first starts early and that a bucket's update finds its gradients in the cache.
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `stop` of the gradients, holding the spans `first` to `last` (exclusive).

    The first bucket starts with the header, unless that is a bucket itself. `parameters_start` is
    the offset of its parameters.
    """

    index: int
    first: int
    last: int
    start: int
    stop: int
    parameters_start: int

    @property
    def has_header(self) -> bool:
        """Whether the bucket includes the header."""
        return self.start < self.parameters_start

    def paths(self, layout: Layout) -> list[tuple[str, slice]]:
        """List the parameters' names, and their ranges from `parameters_start` on."""
        found = []
        for span in layout.spans[self.first : self.last]:
            start = span.start - self.parameters_start
            found.append((span.name, slice(start, start + span.size)))
        return found


def plan_buckets(layout: Layout, limit: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Cut a layout into buckets of at most `limit` bytes; a larger parameter gets its own."""
    cuts: list[int] = []
    nbytes = 0
    starts = [*(span.start for span in layout.spans), layout.size]
    for index, (start, stop) in enumerate(pairwise(starts)):
        size = (stop - start) * layout.dtype.itemsize
        if index and nbytes + size > limit:
            cuts.append(index)
            nbytes = 0
        nbytes += size
    return cut_buckets(layout, tuple(cuts))


def cut_buckets(layout: Layout, cuts: Sequence[int]) -> tuple[Bucket, ...]:
    """Cut a layout into buckets; all but the first start at the spans in `cuts`."""
    begins = [0, *cuts]
    ends = [*cuts, len(layout.spans)]
    starts = [layout.spans[first].start for first in begins]
    stops = [*starts[1:], layout.size]
    return tuple(
        Bucket(index, first, last, start if index else 0, stop, start)
        for index, (first, last, start, stop) in enumerate(
            zip(begins, ends, starts, stops, strict=True)
        )
    )


def header_alone(layout: Layout) -> Bucket:
    """Return a bucket of only the header, so that no gradients delay it."""
    return Bucket(0, 0, 0, 0, layout.header, layout.header)
