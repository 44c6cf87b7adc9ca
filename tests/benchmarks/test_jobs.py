"""Jobs of several processes: together they end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from measure import jobs


def _python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_all_have_said(tmp_path: Path) -> None:
    line = "import os; os.write(1, (os.environ['NAME'] + ' {}\\n').encode())"  # whole, in one piece
    programs = [_python(line.format(each)) for each in range(3)]
    said = jobs.run(programs, environ={"NAME": "rank"}, cwd=tmp_path, deadline=30)
    assert sorted(said.splitlines()) == ["rank 0", "rank 1", "rank 2"]


def test_a_failure_ends_the_others(tmp_path: Path) -> None:
    commands = [_python("import time; time.sleep(60)"), _python("raise SystemExit('so it is')")]
    start = time.monotonic()
    with pytest.raises(jobs.JobError, match=r"(?s)ended with code 1.*so it is"):
        jobs.run(commands, environ={}, cwd=tmp_path, deadline=50)
    assert time.monotonic() - start < 30


def test_time_runs_out(tmp_path: Path) -> None:
    with pytest.raises(jobs.JobError, match=r"still ran after 1 s"):
        jobs.run([_python("import time; time.sleep(60)")], environ={}, cwd=tmp_path, deadline=1)
