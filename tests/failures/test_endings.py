"""One rank ends, in any way: the job ends with it, reports why, and leaves nothing."""

from __future__ import annotations

import re

import pytest

from tests.failures.conftest import Break

torture = pytest.mark.torture
LAUNCHERS = pytest.mark.parametrize("launcher", ["mpirun", "run"])
MOMENTS = ("join", "fit", "collective", "compute")


def moments(*quick: str) -> pytest.MarkDecorator:
    """Run these moments in every test run, and the others in the long one."""
    cases = [m if m in quick else pytest.param(m, marks=torture) for m in MOMENTS]
    return pytest.mark.parametrize("moment", cases)


def scenes(*quick: str) -> pytest.MarkDecorator:
    """Run these launchers with these moments ("run join") in every test run; as `moments`."""
    every = [f"{launcher} {moment}" for launcher in ("mpirun", "run") for moment in MOMENTS]
    assert set(quick) <= {*every}
    cases = [pytest.param(*e.split(), marks=() if e in quick else torture) for e in every]
    return pytest.mark.parametrize(("launcher", "moment"), cases)


def mpichs(moment: str) -> str | None:
    """Name the files that MPICH leaves if a rank ends while the others are inside MPI_Init.

    Its launcher then kills these, also after Ctrl-C: they have made the file, and cannot remove it.
    A program of mpi4py alone leaves the same.
    """
    return "mpich_shm_" if moment == "join" else None


@scenes("mpirun join", "run fit")
def test_a_rank_that_raises_ends_the_job_with_its_traceback(
    broken: Break, launcher: str, moment: str
) -> None:
    with broken(launcher, moment, "raise", size=3) as job:
        result = job.finish_after_action()
        job.assert_nothing_left()
    assert result.code == 1, result
    assert "BoomError: on rank 1" in result.err
    assert "in boom" in result.err


@scenes("mpirun compute", "run collective")
@pytest.mark.parametrize("action", [pytest.param("exit", marks=torture), "bare exit"])
def test_a_rank_that_exits_gives_the_job_its_code(
    broken: Break, launcher: str, moment: str, action: str
) -> None:
    with broken(launcher, moment, action, size=3) as job:
        result = job.finish_after_action()
        job.assert_nothing_left()
    assert result.code == 3, result
    if (launcher, moment) == ("run", "collective"):
        assert "rank 1 (process" in result.err
        assert "failed with exit code 3" in result.err
    if launcher == "mpirun":
        told = r"\[allreduce\] rank 1 \(process \d+\) ends with exit code 3, and all with it\n"
        assert re.search(told, result.err), result.err


@torture
@LAUNCHERS
@pytest.mark.parametrize("moment", ["fit", "collective", "compute"])
def test_a_rank_that_exits_at_once_ends_the_job(broken: Break, launcher: str, moment: str) -> None:
    if (launcher, moment) == ("run", "compute"):
        pytest.skip("nobody waits for anybody")
    with broken(launcher, moment, "os exit", size=3) as job:
        result = job.finish_after_action()
        job.assert_nothing_left()
    assert result.code == 3, result
    if launcher == "run":
        assert re.search(r"rank 1 \(process \d+\) failed with exit code 3", result.err), result.err


@LAUNCHERS
@moments("fit")
@pytest.mark.parametrize("victim", [pytest.param(0, marks=torture), 1])
def test_a_killed_rank_ends_the_job(broken: Break, launcher: str, moment: str, victim: int) -> None:
    with broken(launcher, moment, "kill", victim, 3) as job:
        result = job.finish_after_action()
        job.assert_nothing_left(but=mpichs(moment))
    assert result.code not in (0, None), result
    if launcher == "run":
        assert result.code == 128 + 9
        assert f"rank {victim} (process" in result.err
        assert "was killed by SIGKILL" in result.err
    if launcher == "run" and moment in ("fit", "collective"):
        assert re.search(rf"rank {victim} .* died .* without notice: it was killed", result.err)


@LAUNCHERS
@moments("fit")
def test_a_rank_that_sticks_is_named_when_the_timeout_runs_out(
    broken: Break, launcher: str, moment: str
) -> None:
    if moment == "compute":
        pytest.skip("nobody waits for anybody")
    with broken(launcher, moment, "stop", ALLREDUCE_TIMEOUT="3") as job:
        result = job.finish_after_action()
        job.assert_nothing_left()
    assert result.code == 1, result  # and not that of the one that sticks, which is killed
    if (launcher, moment) == ("mpirun", "join"):  # in MPI, where no Python runs
        state = r"\(process \d+ is stopped, by a signal: kill -CONT lets it go on\)"
        told = rf"rank \d: MPI_Init did not end within 3 s: it waited for rank 1 {state}; "
        told += "every rank"
        assert len(re.findall(told, result.err)) == 1, result.err
        return
    assert "rank 0: " in result.err
    assert "rank 1 " in result.err
    assert "TimeoutError" in result.err or "PeerLostError" in result.err


@LAUNCHERS
@pytest.mark.parametrize("action", ["leave", pytest.param("nothing", marks=torture)])
def test_a_rank_that_ends_normally_is_missed_by_those_that_train_on(
    broken: Break, launcher: str, action: str
) -> None:
    with broken(launcher, "end", action, size=3) as job:
        result = job.finish_after_action()
        job.assert_nothing_left()
    assert result.code == 1, result
    assert "PeerLostError" in result.err
    assert "rank 1" in result.err
    assert "left" in result.err
