"""A call that all members have begun has its result on all, whatever ends the communicator next."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from allreduce import errors
from allreduce.comm import Communicator
from tests.harness import run_ranks, settle_threads

LENGTHS = (3, 3000, 60_000, 1_500_000)


def rounds(home: Communicator, count: int) -> None:
    """Make random calls in a new group each time, until one that differs on a random rank."""
    own = random.Random(home.rank)
    for number in range(count):
        same, part = random.Random(number), home.split(0)
        assert part is not None
        make_calls(part, same, own)
        end_differently(part, same)
        part.close()


def make_calls(comm: Communicator, same: random.Random, own: random.Random) -> None:
    """Make up to four calls, and check each result; the last member may come late to its wait."""
    size, total = comm.size, comm.size * (comm.size + 1) / 2
    for _ in range(same.randint(1, 4)):
        length, kind = same.choice(LENGTHS), same.choice(("sum", "gather", "empty"))
        x = np.full(length, comm.rank + 1.0, "f4")
        if kind == "empty":
            x = comm.empty(length)
            x[:] = comm.rank + 1
        if kind == "gather":
            work = comm.all_gather(x, async_op=True)
            expected = np.repeat(np.arange(1.0, size + 1), length)
        else:
            work = comm.all_reduce(x, out=x, async_op=True)
            expected = np.full(length, total)
        time.sleep(own.choice((0, 0, 0.0005, 0.003)))
        np.testing.assert_array_equal(work.wait(), expected)


def end_differently(comm: Communicator, same: random.Random) -> None:
    """Make a call that differs on one rank, whose error names the call and both versions."""
    odd, length = same.randrange(comm.size), same.choice(LENGTHS)
    with pytest.raises(errors.MismatchError, match="differs: all_reduce"):
        comm.all_reduce(np.ones(length + (comm.rank == odd), "f4"))


def _rank(transport: str, count: int) -> None:
    from allreduce.comm import init
    from tests.comm.core.test_last_calls import rounds

    with init(transport=transport) as comm:
        rounds(comm, count)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "count"), [(3, 15), pytest.param(4, 300, marks=pytest.mark.torture)]
)
def test_processes_have_the_results_of_calls_before_a_mismatch(size: int, count: int) -> None:
    for result in run_ranks(_rank, size, arguments=("shared", count), timeout=60 + 1.5 * count):
        assert result.returncode == 0, result.stderr


def test_threads_have_the_results_of_calls_before_a_mismatch() -> None:
    for number in range(12):

        def member(comm: Communicator, number: int = number) -> str:
            make_calls(comm, random.Random(number), random.Random(f"{number} {comm.rank}"))
            end_differently(comm, random.Random(number))
            return "fine"

        assert settle_threads(member, 3) == ["fine"] * 3


ENDS: dict[str, type[errors.AllreduceError]] = {
    "mismatch": errors.MismatchError,
    "abort": errors.PeerLostError,
    "close": errors.PeerLostError,
    "timeout": errors.TimeoutError,
}


def end(comm: Communicator, how: str) -> None:
    """End the communicator as a member that has completed all its calls."""
    if how == "abort":
        comm.abort("the disk is full")
    elif how == "close":
        comm.close()
    else:
        work = comm.all_reduce(np.ones(3 if how == "mismatch" else 4), async_op=True)
        with pytest.raises(ENDS[how]):
            work.wait(timeout=0.2 if how == "timeout" else None)


def late(comm: Communicator, how: str) -> None:
    """Start three calls, and end the communicator when one member has not waited for them yet."""
    works = [comm.all_reduce(np.ones(3), async_op=True) for _ in range(3)]
    until = time.monotonic() + 25
    while comm.rank == 2 and not comm.dead and time.monotonic() < until:
        time.sleep(0.001)
    for work in works:
        np.testing.assert_array_equal(work.wait(), np.full(3, 3.0))
    if comm.rank == 1:
        end(comm, how)
        return
    with pytest.raises(ENDS[how]):
        comm.all_reduce(np.ones(4))


def _late() -> None:
    from allreduce.comm import init
    from tests.comm.core.test_last_calls import ENDS, late

    with init(transport="shared") as home:
        for how in ENDS:
            part = home.split(0)
            assert part is not None
            late(part, how)
            home.barrier()
            part.close()


def test_who_waits_late_has_its_results_and_then_the_error() -> None:
    for result in run_ranks(_late, 3):
        assert result.returncode == 0, result.stderr
