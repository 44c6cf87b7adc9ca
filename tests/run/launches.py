"""Jobs under the launcher, with a hard deadline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.cluster.processes import Result, run

Write = Callable[[str], Path]
LAUNCH = [sys.executable, "-m", "allreduce.run"]
JOIN = "import os, sys, time, signal\nfrom allreduce import cluster\nworld = cluster.join()\n"


def lines_of(text: str) -> list[str]:
    """Return the lines of a launcher's standard error, without one that comes after 3 s.

    It names ranks that are still ending, which they may be on a busy machine.
    """
    slow = "[allreduce.run] waiting for "
    return [line for line in text.splitlines() if not line.startswith(slow)]


def launch(size: int, path: Path, *arguments: str, deadline: float = 30) -> Result:
    """Run a script's ranks to their end."""
    return run([*LAUNCH, "-n", str(size), str(path), *arguments], deadline=deadline)
