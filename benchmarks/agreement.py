"""Bound the cost of comparing members' calls.

    python -m allreduce.run -n 2 benchmarks/agreement.py

The check cannot be switched off. But an all_reduce without elements does everything except moving
data: it is checked, posted and compared with all members' calls. So its time is an upper bound of
the check's cost in a large call, which is timed alternately in the same run. (Most of it is not the
check: members have to meet.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from measure import ours
from measure.cases import MIB, Case, size_name
from measure.contest import Timing, hold

from allreduce.comm import Communicator, init


def measure(comm: Communicator, nbytes: int, seconds: float) -> list[Timing]:
    """Time a large call and an empty one; a collective call.

    Args:
        comm: The communicator.
        nbytes: The bytes of one rank's input of the large call.
        seconds: The approximate duration.
    """
    cases = [Case("all_reduce", "float32", comm.size, each) for each in (nbytes, 0)]
    contestants = [each for case in cases for each in ours.contestants(comm, case)]
    return hold(contestants, comm.rank, seconds, partial(comm.all_reduce, op="max"))


def show(timings: Sequence[Timing], where: str) -> None:
    """Print all times, and the empty call's share of the large ones."""
    nothing = min(timing.median for timing in timings if timing.nbytes == 0)
    print(f"all_reduce, float32 sum, {where}; microseconds, median (and 99 %)")
    for timing in timings:
        took = f"{timing.median * 1e6:.2f} ({timing.p99 * 1e6:.2f})"
        share = f"; the check takes less than {nothing / timing.median:.1%} of that"
        print(
            f"{size_name(timing.nbytes)} {timing.contestant}: {took}{share * (timing.nbytes > 0)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nbytes", type=int, default=4 * MIB, help="of the large call")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long to measure")
    parser.add_argument("--transport", default="shared")
    options = parser.parse_args()
    with init(transport=options.transport) as comm:
        if comm.size == 1:
            sys.exit("agreement.py: one rank agrees with itself; start several")
        timings = measure(comm, options.nbytes, options.seconds)
        if comm.rank == 0:
            show(timings, f"{comm.size} processes over {comm.transport}")


if __name__ == "__main__":
    main()
