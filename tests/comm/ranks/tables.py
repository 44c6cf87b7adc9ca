"""Rows that stand before the built-in table's: smaller calls then take the ways of large ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from allreduce.comm.selection import choosing
from allreduce.comm.selection.table import TABLE, Row

KIB = 1 << 10
COPYING = ("all_gather", "gather", "scatter", "broadcast", "all_to_all")
# Every copy reads the other process, in many steps.
SOON = Row(
    "shared", COPYING, "cross_process", bytes=(4 * KIB + 1, None), chunk=16 * KIB, past=64 * KIB
)
# Steps so long that a member is easily stopped in the middle of one.
LONG_STEPS = Row("shared", ("all_reduce",), "direct", bytes=(4 * KIB + 1, None), chunk=64 << 20)


@contextmanager
def before_the_table(*rows: Row) -> Iterator[None]:
    """Let rows hold first, for the communicators that this process makes in the block."""
    with mock.patch.object(choosing, "TABLE", (*rows, *TABLE)):
        yield
