"""Jobs under mpirun for tests of the mpi transport."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.processes import mpirun
from tests.harness import Result, run_ranks

FAILURES = """
import numpy as np, os, sys, time
import pytest
from allreduce import errors
from allreduce.comm import init, world
from tests.comm.cases.mpi_cases import transport

world()  # however late the others are started
comm = init(transport="mpi", timeout={timeout})
rank, size = comm.rank, comm.size
began = time.monotonic()

def say(*words):  # in one piece, whoever else writes
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def job(program: str, size: int, timeout: float = 60) -> Result:
    """Run a program under MPICH's mpirun, or skip the test where that is not installed."""
    mpirun(size, Path())
    (result,) = run_ranks(program, size, launcher="mpirun", timeout=timeout)
    return result


def failing(lines: str, size: int = 3, timeout: float = 20) -> list[str]:
    """Run lines that end with `say`, and return each rank's output."""
    result = job(FAILURES.format(timeout=timeout) + lines, size)
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stdout.splitlines() if line]
    assert len(said) == size, result
    return sorted(said)
