"""The cores that this process may run on."""

from __future__ import annotations

import os


def own_cores() -> list[int]:
    """Return the cores of this process, and of this thread where that is bound to others."""
    return sorted(os.sched_getaffinity(os.getpid()) | os.sched_getaffinity(0))
