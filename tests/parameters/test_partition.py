"""An arena's parts are contiguous, cover it, and are nearly equal."""

from __future__ import annotations

from itertools import pairwise

import pytest

from allreduce.parameters.partition import Part, cut
from allreduce.reduction import lay_out

LAYOUT = lay_out([("table", (1000, 16)), ("kernel", (64, 32)), ("bias", (32,))], "float32")


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_parts_cover_the_arena_and_are_cut_between_rows(servers: int) -> None:
    parts = cut(LAYOUT, servers)
    assert parts[0].start == LAYOUT.header
    assert parts[-1].stop == LAYOUT.size
    assert all(a.stop == b.start for a, b in pairwise(parts))
    table = LAYOUT.spans[0]
    for part in parts[1:]:
        if part.start < table.start + table.size:
            assert (part.start - table.start) % 16 == 0
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= 2 * 32


def test_variables_stay_whole_where_they_must() -> None:
    starts = {span.start for span in LAYOUT.spans} | {LAYOUT.size}
    assert all(part.start in starts for part in cut(LAYOUT, 3, by_rows=False))


def test_more_servers_than_rows_leave_some_without_a_part() -> None:
    parts = cut(lay_out([("scalar", ()), ("pair", (2,))], "float64"), 5)
    assert sum(len(part.spans) for part in parts) == 3
    assert [part.size for part in parts].count(0) >= 1


def test_a_part_is_plain_data() -> None:
    part = cut(LAYOUT, 3)[1]
    assert Part.of_json(part.as_json()) == part
