"""Two members that exchange chunks in place: results at every alignment."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.selection.table import Row
from tests.comm.ranks.tables import before_the_table
from tests.harness import run_threads

KIB = 1 << 10
# A chunk, less than a lap of them, and many; the parts of both members alike and not.
COUNTS = ((9 * KIB, 9 * KIB), (30 * KIB, 30 * KIB + 7), (200 * KIB, 200 * KIB), (300001, 90000))


def bytes_of(member: int, count: int) -> np.ndarray:
    return np.random.default_rng(member).integers(0, 256, count, np.uint8)


def lying(count: int, offset: int) -> np.ndarray:
    """Return an array that begins so far into a cache line."""
    whole = np.full(count + 128, 77, np.uint8)
    start = (offset - whole.ctypes.data) % 64
    return whole[start : start + count]


def copies(comm: Communicator, offsets: tuple[int, int], outs: tuple[int, int]) -> None:
    me = comm.rank
    for counts in COUNTS:
        theirs = [bytes_of(member, count) for member, count in enumerate(counts)]
        x, out = lying(counts[me], offsets[me]), lying(sum(counts), outs[me])
        x[:] = theirs[me]
        comm.all_gather(x, counts=counts, out=out)
        np.testing.assert_array_equal(out, np.concatenate(theirs))
        mine = out[me * counts[0] :][: counts[me]]
        out[(1 - me) * counts[0] :][: counts[1 - me]] = 0
        comm.all_gather(mine, counts=counts, out=out)
        np.testing.assert_array_equal(out, np.concatenate(theirs))
        alike = min(counts)
        x, out = lying(2 * alike, offsets[me]), lying(2 * alike, outs[me])
        x[:] = bytes_of(me, 2 * alike)
        comm.all_to_all(x, out=out)
        given = [bytes_of(member, 2 * alike)[me * alike :][:alike] for member in range(2)]
        np.testing.assert_array_equal(out, np.concatenate(given))


@pytest.mark.parametrize("past", [1, 250 * KIB, None])
def test_copies(past: int | None) -> None:
    row = Row(
        *("shared", ("all_gather", "all_to_all"), "pairwise"),
        members=(2, 2),
        bytes=(4 * KIB + 1, None),
        chunk=8 * KIB,
        past=past,
    )
    places = ((0, 0), (16, 16), (16, 5), (1, 48))
    with before_the_table(row):
        for offsets, outs in itertools.product(places, places):
            run_threads(partial(copies, offsets=offsets, outs=outs), 2)
