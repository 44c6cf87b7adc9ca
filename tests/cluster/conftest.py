"""Scripts that the joining tests run, and an environment without a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.processes import PREFIXES

Write = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Write:
    """Write a script that joins as `world`, then runs the given lines."""

    def write(lines: str) -> Path:
        path = tmp_path / "script.py"
        head = "import os, sys, time, signal\nfrom allreduce import cluster\n"
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
