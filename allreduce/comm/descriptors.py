"""How many more files this process may open: asked before members begin to meet.

A process that runs out of descriptors half-way leaves the others waiting for it, and one that is
passed a file finds it missing.
"""

from __future__ import annotations

import os
import resource

_SPARE = 8  # for what comes and goes meanwhile: listeners, strangers, files that are passed on


def shortage(needed: int) -> str:
    """Say that this process cannot open so many files more; nothing if it can.

    Args:
        needed: How many files it will open and keep.
    """
    needed += _SPARE
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The listing itself is one of those that are open.
    left = most + 1 - sum(int(name) < most for name in os.listdir("/proc/self/fd"))
    if most == resource.RLIM_INFINITY or left >= needed:
        return ""
    raised = "raise it with ulimit -n" if hard > most else "have its administrator raise it"
    return (
        f"it needs {needed} file descriptors, but {max(0, left)} are left of the {most} that "
        f"ulimit -n allows; {raised}"
    )
