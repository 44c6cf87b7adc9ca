"""Members whose shares are empty take part like the others, whenever they come."""

from __future__ import annotations

import time

import numpy as np
import pytest

from allreduce.comm import Communicator
from tests.harness import run_threads

ROWS = 300_000  # several chunks
LATE = 2  # gives and gets nothing, and is the last to call


@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_a_member_without_rows_comes_last(collective: str) -> None:
    counts = [0, ROWS, 0]

    def move(comm: Communicator) -> int | None:
        if comm.rank == LATE:
            time.sleep(0.1)  # until the others have posted
        if collective == "gather":
            own = np.ones(counts[comm.rank], np.float32)
            joined = comm.gather(own, counts=counts, async_op=True).wait()
            return None if joined is None else int(joined.sum())
        whole = np.ones(ROWS, np.float32) if comm.rank == 0 else None
        share = np.empty(counts[comm.rank], np.float32)
        return int(comm.scatter(whole, counts=counts, out=share, async_op=True).wait().sum())

    assert run_threads(move, 3) == ([ROWS, None, None] if collective == "gather" else counts)


def test_all_to_all_of_two_of_three() -> None:
    sends = [[0, ROWS, 0], [ROWS, 0, 0], [0, 0, 0]]

    def exchange(comm: Communicator) -> float:
        mine = sends[comm.rank]
        x = np.full(sum(mine), comm.rank + 1, np.float32)
        return float(comm.all_to_all(x, counts=mine).sum())

    for _ in range(5):
        assert run_threads(exchange, 3) == [2 * ROWS, ROWS, 0]


def test_an_empty_share_may_lie_in_any_memory() -> None:
    def join(comm: Communicator) -> float:
        buffer = comm.empty(ROWS)  # on rank 1 it is not used
        own = buffer if comm.rank == 0 else np.empty(0, np.float32)
        buffer[:] = 1
        return float(comm.all_gather(own, counts=[ROWS, 0]).sum())

    assert run_threads(join, 2) == [ROWS, ROWS]
