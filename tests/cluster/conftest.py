"""Scripts that the joining tests run, and an environment without a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.processes import PREFIXES

Write = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path) -> Write:
    """Write a script that joins as `world`, then runs the given lines.

    If so many processes are to join `at_once`, each waits until all have imported what it takes.
    """

    def write(lines: str, *, at_once: int = 0) -> Path:
        path, here = tmp_path / "script.py", tmp_path / "here"
        here.mkdir()
        head = "import os, sys, time, signal\nfrom allreduce import cluster\n"
        if at_once:
            head += f"from allreduce.cluster.leader import meeting, service\nhere = {str(here)!r}\n"
            head += "os.mkdir(f'{here}/{os.getpid()}')\n"
            head += f"while len(os.listdir(here)) < {at_once}: time.sleep(0.02)\n"
        path.write_text(f"{head}world = cluster.join()\n{lines}\n")
        return path

    return write


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every word about a job out of this process's environment."""
    import os

    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
