"""Which server holds which part of an arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from allreduce.reduction import Layout, Span


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `start` to `stop` of an arena, on one server.

    Attributes:
        spans: The path of each variable in it, with its first element and the one behind its last,
            counted from `start`.
    """

    start: int
    stop: int
    spans: tuple[tuple[str, int, int], ...]

    @property
    def size(self) -> int:
        return self.stop - self.start

    def as_json(self) -> dict[str, Any]:
        """Return plain data, which `of_json` reads."""
        return {
            "start": self.start,
            "stop": self.stop,
            "spans": [list(each) for each in self.spans],
        }

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Part:
        """Make the part that `as_json` described."""
        spans = tuple((str(path), int(low), int(high)) for path, low, high in found["spans"])
        return cls(int(found["start"]), int(found["stop"]), spans)


def cut(layout: Layout, servers: int, *, by_rows: bool = True) -> tuple[Part, ...]:
    """Cut an arena into one contiguous part per server, of nearly equal bytes.

    A variable that lies in two parts is cut between two rows.

    Args:
        layout: The arena's layout.
        servers: The number of servers.
        by_rows: Whether variables may be cut. Optimizers that need norms of whole variables, such
            as LAMB, do not allow it.

    Returns:
        A part for each server; parts may be empty if there are few rows.
    """
    places = [layout.header]
    for server in range(1, servers):
        ideal = layout.header + (layout.size - layout.header) * server // servers
        places.append(max(places[-1], _nearest(layout, ideal, by_rows)))
    places.append(layout.size)
    return tuple(
        Part(start, stop, _spans(layout.spans, start, stop)) for start, stop in pairwise(places)
    )


def _nearest(layout: Layout, ideal: int, by_rows: bool) -> int:
    """Return the place next to an ideal one at which the arena may be cut."""
    ends = [*(span.start for span in layout.spans[1:]), layout.size]
    for span, end in zip(layout.spans, ends, strict=True):
        if ideal >= end:
            continue
        rows = span.shape[0] if by_rows and span.shape else 1
        row = span.size // rows if rows else 0
        chosen = round((ideal - span.start) / row) if row else 0
        return end if chosen >= rows else span.start + chosen * row
    return layout.size


def _spans(spans: Sequence[Span], start: int, stop: int) -> tuple[tuple[str, int, int], ...]:
    found = []
    for span in spans:
        low, high = max(span.start, start), min(span.start + span.size, stop)
        if low < high:
            found.append((span.name, low - start, high - start))
    return tuple(found)
