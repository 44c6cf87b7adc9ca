"""Time all_reduce beside mpi4py's, alternating in one run.

    mpirun -n 2 python benchmarks/collectives.py

Each run rewrites the inputs, meets in a barrier of the contestant's own kind, and times one call in
place; a run's time is the slowest rank's. Results are checked. The contestants are `comm.empty`
memory, ordinary NumPy arrays, and MPI's `Allreduce` on ordinary arrays.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from report import Row, summarize, write

from allreduce.comm import Communicator, init

Array = NDArray[Any]
KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 256, 4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MPI_NAME = "MPI"
WARM_UP, FEWEST, MOST = 5, 10, 4000  # runs


@dataclass(frozen=True)
class Contestant:
    """One way to reduce in place: its array, its call, and the barrier before it."""

    name: str
    array: Array
    call: Callable[[], Any]
    barrier: Callable[[], Any]

    def run(self, source: Array) -> float:
        """Do one run; returns its seconds on this rank."""
        np.copyto(self.array, source)
        self.barrier()
        start = time.perf_counter()
        self.call()
        return time.perf_counter() - start


def contestants(comm: Communicator, mpi: MPI.Comm, count: int) -> list[Contestant]:
    symmetric = comm.empty((count,), "float32")
    ordinary, theirs = np.empty(count, "float32"), np.empty(count, "float32")
    return [
        Contestant(
            "comm.empty", symmetric, lambda: comm.all_reduce(symmetric, out=symmetric), comm.barrier
        ),
        Contestant(
            "ordinary", ordinary, lambda: comm.all_reduce(ordinary, out=ordinary), comm.barrier
        ),
        Contestant(MPI_NAME, theirs, lambda: mpi.Allreduce(MPI.IN_PLACE, theirs), mpi.Barrier),
    ]


def measure(comm: Communicator, mpi: MPI.Comm, nbytes: int, seconds: float) -> list[Row]:
    """Time all contestants at one size, in turn."""
    runners = contestants(comm, mpi, nbytes // 4)
    pattern = np.arange(nbytes // 4, dtype="float32") % 64
    source = pattern + comm.rank
    start = time.perf_counter()
    for _ in range(WARM_UP):
        for runner in runners:
            runner.run(source)
    each = comm.all_reduce((time.perf_counter() - start) / WARM_UP, op="max")
    runs = int(min(MOST, max(FEWEST, seconds / each)))
    times = np.array([[runner.run(source) for runner in runners] for _ in range(runs)])
    for runner in runners:
        expected = pattern * comm.size + sum(range(comm.size))
        np.testing.assert_array_equal(runner.array, expected, err_msg=runner.name)
    slowest = comm.all_reduce(times, op="max")
    by_name = {runner.name: slowest[:, i].tolist() for i, runner in enumerate(runners)}
    return summarize(_size(nbytes), by_name, baseline=MPI_NAME)


def _size(nbytes: int) -> str:
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/collectives"))
    parser.add_argument("--seconds", type=float, default=2.0, help="per size")
    parser.add_argument("--smallest", type=int, default=SIZES[0], help="bytes")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    options = parser.parse_args()
    rows: list[Row] = []
    with init() as comm:
        for nbytes in SIZES:
            if options.smallest <= nbytes <= options.largest:
                rows += measure(comm, MPI.COMM_WORLD, nbytes, options.seconds)
        if comm.rank == 0:
            library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
            title = f"all_reduce, float32 sum, {comm.size} processes; {library}"
            write(rows, options.out, " ".join(title.split()))


if __name__ == "__main__":
    main()
