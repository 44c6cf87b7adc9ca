"""Ranks that are killed, stopped and terminated at random moments of `fit`."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time

import pytest

from tests.cluster.processes import Result
from tests.failures.conftest import Break
from tests.failures.jobs import Job

SIZE = 3
_LIMIT_SECONDS = 20.0  # from the signal to the launcher's end
_STOP_SECONDS = 2.0
# As a survivor reports it: its own rank, and the process of the rank that is lost.
_LOST = re.compile(
    r"rank (\d)(?: \([^)]*\))?: rank \d \([^\n]*?process (\d+)[^)]*\) (?:died|is gone)"
)


def _ended(job: Job) -> Result:
    """Wait for the job's end; ranks that are late tell where they are."""
    late = threading.Timer(_LIMIT_SECONDS, _abort, (job,))
    late.start()
    try:
        return job.finish(_LIMIT_SECONDS + 2)
    finally:
        late.cancel()


def _abort(job: Job) -> None:
    for pid in job.living():
        if pid != job.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)  # PYTHONFAULTHANDLER prints all threads


def _kill(job: Job, pid: int) -> None:
    """Each survivor names the killed rank's process, and no other."""
    os.kill(pid, signal.SIGKILL)
    result = _ended(job)
    assert result.code == 128 + signal.SIGKILL, result
    lost = _LOST.findall(result.err)
    assert {int(named) for _, named in lost} == {pid}, result
    assert len({survivor for survivor, _ in lost}) == SIZE - 1, result


def _terminate(job: Job, pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    result = _ended(job)
    assert result.code == 128 + signal.SIGTERM, result


def _stop(job: Job, pid: int) -> None:
    """A rank that goes on again is waited for; then the whole job can still be terminated."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_STOP_SECONDS)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.2)
    assert len(job.living()) > SIZE, _ended(job)
    job.process.signal(signal.SIGTERM)
    assert _ended(job).code == 128 + signal.SIGTERM


@pytest.mark.torture
@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
@pytest.mark.parametrize("seed", range(68))
def test_fit_ends_after_a_signal_at_a_random_moment(
    broken: Break, transport: str, seed: int
) -> None:
    draw = random.Random(f"{transport} {seed}")
    env = {"ALLREDUCE_TRANSPORT": transport, "PYTHONFAULTHANDLER": "1"}
    with broken("run", "fit", size=SIZE, **env) as job:
        pids = job.ready()
        time.sleep(draw.random())
        draw.choice([_kill, _kill, _terminate, _stop])(job, draw.choice(pids))
        job.assert_nothing_left()
