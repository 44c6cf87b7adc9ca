"""Late ranks are named where the ranks of a launcher meet, also from inside of MPI_Init."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allreduce.cluster.host import waiting
from allreduce.cluster.mpi.arrival_tracker import REMEDY, ArrivalTracker, LaunchedRank
from tests.cluster.processes import running

STOPPED = "is stopped, by a signal: kill -CONT lets it go on"
RANKS = 3


@pytest.fixture
def ranks() -> list[LaunchedRank]:
    """The ranks of a job that this process has launched."""
    job = str(uuid.uuid4())
    return [LaunchedRank(rank, RANKS, "A_RANK", job, os.getpid()) for rank in range(RANKS)]


@pytest.fixture
def pids(ranks: list[LaunchedRank]) -> Iterator[list[int]]:
    """The processes of its ranks; the last is a shell's, which runs what is the rank."""
    with contextlib.ExitStack() as stack:
        found = []
        for launched in ranks:
            command = ["sleep", "60"] if launched.rank < 2 else ["sh", "-c", "sleep 60; true"]
            process = subprocess.Popen(
                command, env={**os.environ, "B_A_RANK": "7", launched.variable: str(launched.rank)}
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            found.append(process.pid)
        until = time.monotonic() + 20
        for pid in found:  # exec has begun, but the kernel shows the environment a little later
            while b"A_RANK=" not in Path(f"/proc/{pid}/environ").read_bytes():
                assert time.monotonic() < until
                time.sleep(0.01)
        yield found


def test_who_has_not_come_is_late(ranks: list[LaunchedRank], pids: list[int]) -> None:
    with (
        ArrivalTracker(ranks[1]) as here,
        ArrivalTracker(ranks[0]._replace(job="another")),
    ):
        texts = [f"rank {rank} (process {pids[rank]} is alive)" for rank in (0, 2)]
        assert here.late() == ", ".join(texts)
        with (
            ArrivalTracker(ranks[0]),
            ArrivalTracker(ranks[2]),
        ):
            assert not here.late()
        assert here.late() == ", ".join(texts)


def test_who_is_stopped_is_late_though_it_has_come(
    ranks: list[LaunchedRank], pids: list[int]
) -> None:
    with contextlib.ExitStack() as all_come:
        *_, here = [all_come.enter_context(ArrivalTracker(launched)) for launched in ranks]
        os.kill(pids[0], signal.SIGSTOP)
        os.waitid(os.P_PID, pids[0], os.WSTOPPED)
        assert here.late() == f"rank 0 (process {pids[0]} {STOPPED})"
        os.kill(pids[0], signal.SIGKILL)
        os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
        assert not here.late()  # it has ended: its launcher knows


def test_what_a_shell_has_started_is_looked_at(ranks: list[LaunchedRank], pids: list[int]) -> None:
    listed = Path(f"/proc/{pids[2]}/task/{pids[2]}/children")
    child = int(_soon(listed.read_text))
    with contextlib.ExitStack() as all_come:
        here, *_ = [all_come.enter_context(ArrivalTracker(launched)) for launched in ranks]
        os.kill(child, signal.SIGSTOP)
        try:
            assert _soon(here.late) == f"rank 2 (process {child} {STOPPED})"
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_nobody_has_waited_for_keeps_no_rank_from_coming(
    ranks: list[LaunchedRank],
) -> None:
    command = ["sh", "-c", "true & exec sleep 60"]  # which waits for no rank
    with subprocess.Popen(command, env={**os.environ, ranks[0].variable: "0"}) as rank:
        listed = Path(f"/proc/{rank.pid}/task/{rank.pid}/children")
        child = Path(f"/proc/{_soon(listed.read_text).strip()}/stat")
        _soon(lambda: child.read_text() if ") Z" in child.read_text() else "")
        with (
            ArrivalTracker(ranks[0]),
            ArrivalTracker(ranks[1]) as here,
        ):
            assert not here.late()
        rank.kill()


def test_a_wait_does_not_count_how_long_its_process_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "waits.py"
    path.write_text(
        "import time\n"
        "from allreduce.cluster.mpi.arrival_tracker import ArrivalTracker, LaunchedRank\n"
        f"launched = LaunchedRank(0, 2, 'A_RANK', '{uuid.uuid4()}')\n"
        "with ArrivalTracker(launched).watch(1.5):\n"
        "    print('waits', flush=True)\n"
        "    for _ in range(5): time.sleep(0.1)\n"
    )
    with running([sys.executable, str(path)]) as process:
        process.line()
        process.signal(signal.SIGSTOP)
        time.sleep(2)
        process.signal(signal.SIGCONT)
        assert process.finish(25).code == 0


def _soon(look: Callable[[], str]) -> str:
    """Return the first text that is not empty within 25 s."""
    for _ in range(2500):
        if text := look():
            return text
        time.sleep(0.01)
    return ""


def test_who_has_failed_to_meet_has_come(ranks: list[LaunchedRank], pids: list[int]) -> None:
    everybody = f"rank 0 (process {pids[0]} is alive), rank 1 (process {pids[1]} is alive)"
    with ArrivalTracker(ranks[2]) as here:
        assert here.late() == everybody
        with contextlib.suppress(ValueError), ArrivalTracker(ranks[1]):
            raise ValueError
        assert here.late() == everybody.partition(",")[0]
        with ArrivalTracker(ranks[1]):  # again
            assert here.late() == everybody.partition(",")[0]
        assert here.late() == everybody


def test_one_rank_tells_of_a_wait_where_the_launcher_is_unknown(
    ranks: list[LaunchedRank],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(waiting, "WARN_SECONDS", 0.1)
    *_, first, second = [launched._replace(launcher=0) for launched in ranks]
    with (
        ArrivalTracker(second) as later,
        ArrivalTracker(first) as here,
        later.watch(60),
        here.watch(60),
    ):
        said = _soon(lambda: capfd.readouterr().err)
    awaited = f"other ranks; {REMEDY} (for 0.1 s so far, of 60 s)"
    assert said == f"[allreduce] rank 1: waiting in MPI_Init for {awaited}\n"
