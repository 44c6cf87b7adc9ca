"""A process that waits long to join names the awaited ranks once, before the wait fails."""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from pathlib import Path

import pytest

from allreduce.cluster.host import waiting
from tests.cluster.processes import free_address, mpirun, run, run_together, running
from tests.cluster.resolvers.test_explicit import said
from tests.cluster.resolvers.test_slurm import task

JOIN = (
    "import sys, time\n"
    "from allreduce.cluster.host import waiting\n"
    "waiting.WARN_SECONDS = 0.5\n"
    "from allreduce import cluster\n"
    "{before}\n"
    "world = cluster.join()\n"
    "{after}\n"
)


def script(folder: Path, before: str = "", after: str = "") -> Path:
    path = folder / "script.py"
    path.write_text(JOIN.format(before=before, after=after))
    return path


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if "waiting for" in line]


def test_a_step_whose_first_task_does_not_come(tmp_path: Path) -> None:
    job = str(uuid.uuid4().int % 10**9)
    told = [task(1, 2, job) | {"ALLREDUCE_TIMEOUT": "2"}]
    (result,) = run_together(script(tmp_path), told)
    (line,) = warnings(result.err)
    assert line.startswith(f"[allreduce] rank 1: waiting for task 0 of step {job}.3; every task")
    assert "task 0 of step" in result.err.splitlines()[-1]


def test_ranks_that_do_not_join_are_named_by_the_leaders_process(tmp_path: Path) -> None:
    address = free_address()
    told = [said(rank, 4, address, TIMEOUT="2") for rank in (0, 2)]
    first, other = run_together(script(tmp_path), told)
    (line,) = warnings(first.err)
    assert line.startswith("[allreduce] rank 0: waiting for ranks 1, 3 of 4 to join; every rank")
    assert not warnings(other.err)


def test_a_rank_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    address = free_address()
    late = "import os, time\nif os.environ['ALLREDUCE_RANK'] == '1': time.sleep(1.2)"
    path = script(tmp_path, late, "world.exchange('end', b'', 20)")
    results = run_together(path, [said(rank, 2, address) for rank in range(2)])
    assert [result.code for result in results] == [0, 0], results
    assert "waiting for rank 1 of 2 to join" in warnings(results[0].err)[0]


def test_an_exchange_that_a_rank_comes_late_to(tmp_path: Path) -> None:
    after = "if world.rank == 1: time.sleep(1)\nprint(world.exchange('k', b'%d' % world.rank, 9))"
    address = free_address()
    path = script(tmp_path, after=after)
    results = run_together(path, [said(rank, 2, address) for rank in range(2)])
    assert [result.out for result in results] == ["[b'0', b'1']\n"] * 2, results
    (line,) = warnings(results[0].err)
    assert (
        "waiting for rank 1 to make a communicator together; every rank has to make the same calls"
        in line
    )


def test_a_rank_of_mpis_that_never_joins(tmp_path: Path) -> None:
    """It has initialised MPI, so that no launcher's or library's clock runs for it."""
    before = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: time.sleep(20)"
    result = run(mpirun(2, script(tmp_path, before)), {"ALLREDUCE_TIMEOUT": "2"})
    (line,) = warnings(result.err)
    late = r"rank 1 \(process \d+ is alive\)"
    assert re.match(rf"\[allreduce\] rank 0: waiting for {late}; every rank has", line), line
    assert re.search(rf"the MPI ranks did not all join within 2 s: {late} did not", result.err)
    assert result.seconds < 15


def test_a_wait_that_ends_sooner_is_not_reported() -> None:
    wait = waiting.Wait(5)
    assert wait.quiet == pytest.approx(wait.remaining, abs=0.1)
    assert wait.has_time_left("nobody")
    assert not waiting.Wait(0).has_time_left("nobody")


def test_the_launcher_says_it_among_its_own_lines(tmp_path: Path) -> None:
    late = "import os, time\nif os.environ['ALLREDUCE_RANK'] == '1': time.sleep(1.2)"
    launch = "from allreduce.cluster.host import waiting\nwaiting.WARN_SECONDS = 0.5\n"
    launch += "from allreduce.run import app\napp()"
    result = run([sys.executable, "-c", launch, "-n", "2", str(script(tmp_path, late))])
    assert result.code == 0, result.err
    (line,) = warnings(result.err)
    assert line.startswith("[allreduce.run] waiting for rank 1 of 2 to join; every rank has to")


def test_the_launcher_says_that_a_rank_is_stopped_before_it_has_joined(tmp_path: Path) -> None:
    stop = "import os, signal\nif os.environ['ALLREDUCE_RANK'] == '1': "
    stop += "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    launch = "from allreduce.cluster.host import waiting\nwaiting.WARN_SECONDS = 0.3\n"
    launch += "from allreduce.cluster.launcher import job\n"
    launch += "job._POLL_SECONDS = 0.05\nfrom allreduce.run import app\napp()"
    command = [sys.executable, "-c", launch, "-n", "2", str(script(tmp_path, stop))]
    with running(command) as process:
        pid = int(process.line().split()[1])
        line = ""
        while "is stopped" not in line:
            line = process.error_line()
        state = f"process {pid} is stopped, by a signal: kill -CONT lets it go on"
        assert line == f"[allreduce.run] waiting for rank 1 ({state})"
        os.kill(pid, signal.SIGCONT)
        assert process.finish(25).code == 0
