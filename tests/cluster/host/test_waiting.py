"""A process that waits long to join names the awaited ranks once, before the wait fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from allreduce.cluster.host import waiting
from tests.cluster.leader.test_service import hosting, meeting
from tests.cluster.processes import (
    Running,
    free_address,
    mpirun,
    run,
    run_together,
    running,
    wait_until,
)
from tests.cluster.resolvers.test_explicit import said
from tests.cluster.resolvers.test_slurm import task

JOIN = (
    "import os, sys, time\n"
    "from allreduce.cluster.host import waiting\n"
    "waiting.WARN_SECONDS = 0.5\n"
    "from allreduce import cluster\n"
    "def await_gate():\n"
    "    while not os.path.exists({gate!r}): time.sleep(0.02)\n"
    "{before}\n"
    "world = cluster.join()\n"
    "{after}\n"
)
LATE = "if os.environ['ALLREDUCE_RANK'] == '1': await_gate()"


def script(folder: Path, before: str = "", after: str = "") -> Path:
    path = folder / "script.py"
    gate = str(folder / "gate")  # for which `await_gate` waits
    path.write_text(JOIN.format(gate=gate, before=before, after=after))
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


@contextlib.contextmanager
def two_ranks(path: Path) -> Iterator[list[Running]]:
    """Start both ranks of a job."""
    address = free_address()
    with contextlib.ExitStack() as stack:
        command = [sys.executable, str(path)]
        yield [stack.enter_context(running(command, said(rank, 2, address))) for rank in range(2)]


def test_ranks_that_do_not_join_are_named_once_by_the_leaders_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "WARN_SECONDS", 60)
    with hosting(4) as leader, ThreadPoolExecutor(2) as pool:
        pool.submit(meeting(leader.address, 2, 4, timeout=90).join)
        wait_until(lambda: 1 in leader.groups and leader.groups[1].absent == [0, 1, 3])
        monkeypatch.setattr(waiting, "WARN_SECONDS", 0.2)
        pool.submit(meeting(leader.address, 0, 4, timeout=90).join)
        wait_until(lambda: "of 4 to join" in caplog.text)
        leader.close()
    (said,) = [each for each in caplog.messages if "of 4 to join" in each]
    assert said.startswith("waiting for ranks 1, 3 of 4 to join; every rank has to call")


def test_a_rank_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    with two_ranks(script(tmp_path, LATE, "world.exchange('end', b'', 60)")) as ranks:
        ranks[0].error_line("waiting for rank 1 of 2 to join")
        (tmp_path / "gate").touch()
        results = [rank.finish(25) for rank in ranks]
    assert [result.code for result in results] == [0, 0], results


def test_an_exchange_that_a_rank_comes_late_to(tmp_path: Path) -> None:
    after = f"{LATE}\nprint(world.exchange('k', b'%d' % world.rank, 60))"
    told = (
        "waiting for rank 1 to make a communicator together; every rank has to make the same calls"
    )
    with two_ranks(script(tmp_path, after=after)) as ranks:
        ranks[0].error_line(told)
        (tmp_path / "gate").touch()
        results = [rank.finish(25) for rank in ranks]
    assert [result.out for result in results] == ["[b'0', b'1']\n"] * 2, results
    assert not warnings(results[0].err)  # no second one


def test_a_rank_of_mpis_that_never_joins(tmp_path: Path) -> None:
    """It has initialised MPI, so that no launcher's or library's clock runs for it."""
    before = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: time.sleep(60)"
    result = run(mpirun(2, script(tmp_path, before)), {"ALLREDUCE_TIMEOUT": "2"}, deadline=40)
    (line,) = warnings(result.err)
    late = r"rank 1 \(process \d+ is alive\)"
    assert re.match(rf"\[allreduce\] rank 0: waiting for {late}; every rank has", line), line
    assert re.search(rf"the MPI ranks did not all join within 2 s: {late} did not", result.err)


def test_a_wait_that_ends_sooner_is_not_reported() -> None:
    wait = waiting.Wait(5)
    remaining = wait.remaining
    assert 0 < wait.quiet <= remaining
    assert wait.has_time_left("nobody")
    assert not waiting.Wait(0).has_time_left("nobody")


def test_the_launcher_says_it_among_its_own_lines(tmp_path: Path) -> None:
    launch = "from allreduce.cluster.host import waiting\nwaiting.WARN_SECONDS = 0.5\n"
    launch += "from allreduce.run import app\napp()"
    with running([sys.executable, "-c", launch, "-n", "2", str(script(tmp_path, LATE))]) as process:
        line = process.error_line("waiting for")
        assert line.startswith("[allreduce.run] waiting for rank 1 of 2 to join; every rank has to")
        (tmp_path / "gate").touch()
        result = process.finish(25)
    assert (result.code, warnings(result.err)) == (0, []), result


def test_the_launcher_says_that_a_rank_is_stopped_before_it_has_joined(tmp_path: Path) -> None:
    stop = "import signal\nif os.environ['ALLREDUCE_RANK'] == '1': "
    stop += "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    launch = "from allreduce.cluster.host import waiting\nwaiting.WARN_SECONDS = 0.3\n"
    launch += "from allreduce.cluster.launcher import job\n"
    launch += "job._POLL_SECONDS = 0.05\nfrom allreduce.run import app\napp()"
    command = [sys.executable, "-c", launch, "-n", "2", str(script(tmp_path, stop))]
    with running(command) as process:
        pid = int(process.line().split()[1])
        line = process.error_line("is stopped")
        state = f"process {pid} is stopped, by a signal: kill -CONT lets it go on"
        assert line == f"[allreduce.run] waiting for rank 1 ({state})"
        os.kill(pid, signal.SIGCONT)
        assert process.finish(25).code == 0
