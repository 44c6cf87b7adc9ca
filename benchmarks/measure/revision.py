"""Which state of the checkout figures are of: rows of one file may be of several."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass

from measure.environments import REPOSITORY

_MEASURED = ("allreduce", "strategies", "kernels", "benchmarks/*.py")  # not the results themselves


@dataclass(frozen=True)
class Revision:
    """When something was measured, and of which commit."""

    time: str
    commit: str


def current() -> Revision:
    """Return the checkout's commit, with a plus if files differ from it, and the time of now."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = commit and _git("status", "--porcelain", "--", *_MEASURED)
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Revision(moment, (commit or "unknown") + "+" * bool(changed))


def _git(*arguments: str) -> str:
    """Return git's output; "" outside of a checkout."""
    try:
        told = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()
