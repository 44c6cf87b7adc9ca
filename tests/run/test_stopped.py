"""Stopped ranks, and a stopped launcher: what looks like work is told apart from it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import running
from tests.run.launches import LAUNCH, Write, lines_of

HASTY = (  # the launcher, which looks more often, and waits less
    "from allreduce.cluster.launcher import job\njob._POLL_SECONDS = 0.05\n"
    "job._NOTICE_SECONDS = 0.1\n"
    "from allreduce.run import app\napp()"
)
LAST = (  # rank 1 stays when rank 0 has ended
    "import os, sys, time\nif os.environ['ALLREDUCE_RANK'] == '0': sys.exit()\n"
    "os.write(2, b'%d\\n' % os.getpid())\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
)


@contextlib.contextmanager
def last_rank(path: Path, gate: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Launch `LAST`, which stays until the gate is there; gives the launcher, and its pid."""
    command = [sys.executable, "-c", HASTY, "-np", "2", str(path), str(gate)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield process, int(process.stderr.readline().split()[1])
        finally:
            process.kill()


def test_a_stopped_rank_that_keeps_the_job_is_named_once(script: Write, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with last_rank(script(LAST), gate) as (process, rank):
        os.kill(rank, signal.SIGSTOP)
        assert process.stderr is not None
        state = f"process {rank} is stopped, by a signal: kill -CONT lets it go on"
        line = process.stderr.readline()
        assert line == f"[allreduce.run] waiting for rank 1 ({state})\n"
        gate.touch()
        os.kill(rank, signal.SIGCONT)
        assert process.wait(25) == 0
        assert not process.stderr.read()


def test_ctrl_c_ends_a_job_whose_last_rank_is_in_a_debugger(script: Write, tmp_path: Path) -> None:
    with last_rank(script(LAST), tmp_path / "gate") as (process, rank):
        seize(rank)
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            state = f"process {rank} is stopped, by a debugger"
            assert line == f"[allreduce.run] waiting for rank 1 ({state})\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(25) == 130
            interrupted, held = lines_of(process.stderr.read())
            assert interrupted == "[allreduce.run] interrupted; ending rank 1"
            assert f"rank 1 (process {rank}) is dead, but process {os.getpid()}" in held
        finally:
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)  # as debuggers do


def seize(pid: int) -> None:
    """Stop a process as a debugger does, or skip the test where nobody may."""
    libc, seize, interrupt = ctypes.CDLL(None, use_errno=True), 0x4206, 0x4207  # ptrace(2)
    for request in (seize, interrupt):
        if libc.ptrace(request, pid, None, None) != 0:
            pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")


def test_a_stopped_launcher_stops_its_ranks_until_it_goes_on(script: Write) -> None:
    path = script("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)")
    with running([*LAUNCH, "-n", "1", str(path)]) as process:
        rank = int(process.line().split()[1])
        process.signal(signal.SIGTSTP)
        assert wait_state((process.pid, rank), "T") == "TT"
        process.signal(signal.SIGCONT)
        assert wait_state((process.pid, rank), "S") == "SS"
        process.signal(signal.SIGTERM)
        assert process.finish(25).code == 128 + signal.SIGTERM


def wait_state(pids: tuple[int, ...], state: str) -> str:
    """Wait at most 25 s until all processes are in a state; returns the states."""
    for _ in range(1250):
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
        states = "".join(stat.rpartition(")")[2].split()[0] for stat in stats)
        if set(states) == {state}:
            break
        time.sleep(0.02)
    return states
