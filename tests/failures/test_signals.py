"""Signals from outside, at any moment: Ctrl-C, SIGTERM, SIGKILL to whomever."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.failures.conftest import Break
from tests.failures.jobs import DEADLINE
from tests.failures.test_endings import LAUNCHERS, moments, mpichs, scenes


@scenes("mpirun fit", "run join", "run collective")
def test_ctrl_c_ends_the_job_with_one_line(broken: Break, launcher: str, moment: str) -> None:
    with broken(launcher, moment, size=3) as job:
        job.ready()
        job.process.signal(signal.SIGINT, group=True)
        result = job.finish(DEADLINE)
        job.assert_nothing_left(but=mpichs(moment))
    if (launcher, moment) == ("mpirun", "join"):
        # One rank has not joined, and says so itself; mpirun kills the others, inside MPI_Init.
        assert result.code not in (0, None), result
        return
    assert result.code in (130, -signal.SIGINT), result
    ours = [line for line in result.err.splitlines() if "interrupted" in line]
    assert len(ours) == 1, result
    assert "Traceback" not in result.err
    assert "Error" not in result.err


def test_an_interrupt_of_one_rank_is_one_line_on_each_other_that_names_it(broken: Break) -> None:
    with broken("run", "fit", size=3) as job:
        pid = job.ready()[0]
        os.kill(pid, signal.SIGINT)
        result = job.finish(DEADLINE)
        job.assert_nothing_left()
    assert result.code == 130, result
    assert "Traceback" not in result.err
    lines = "\n".join(result.err.splitlines())
    own = re.findall(rf"\[allreduce.run\] rank (\d) \(process {pid}\) was interrupted", lines)
    # Told by whoever comes first: the step that was interrupted, or the end of the program.
    ended = r"aborted .*(?:KeyboardInterrupt|an interrupt)"
    told = rf"\n\[\d\] \[allreduce\] \[shared\] rank \d: rank (\d) {ended}"
    others = re.findall(told, f"\n{lines}")
    assert len(own) == 1, result
    assert others == own * 2, result


@LAUNCHERS
@moments("fit")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.torture)]
)
def test_a_terminated_launcher_takes_the_job_along(
    broken: Break, launcher: str, moment: str, number: signal.Signals
) -> None:
    with broken(launcher, moment, size=3) as job:
        job.ready()
        job.process.signal(number)
        result = job.finish(DEADLINE)
        job.assert_nothing_left(but=mpichs(moment))
    assert result.code != 0


@LAUNCHERS
@moments("collective")
def test_a_killed_launcher_takes_the_job_along(broken: Break, launcher: str, moment: str) -> None:
    with broken(launcher, moment, size=3) as job:
        job.ready()
        job.process.signal(signal.SIGKILL)
        job.assert_nothing_left(but=mpichs(moment))


@LAUNCHERS
@moments("fit")
def test_nothing_is_left_when_everything_is_killed(
    broken: Break, launcher: str, moment: str
) -> None:
    with broken(launcher, moment, size=3) as job:
        job.ready()
        job.kill()
        job.assert_nothing_left(but=mpichs(moment))
