"""How much address space this process may still map: asked before gRPC starts its threads.

Where `ulimit -v` leaves too little for a thread, gRPC aborts the process without a word, or it does
not connect.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from allreduce.errors import JoinError

LINE_THREADS = 4  # of gRPC's, and ours, to call a leader
_LEADER_THREADS = 7  # to host one; besides, gRPC starts one for each core
_POOL = range(2, 17)  # how many these can be
_ARENA = 64 * 2**20  # bytes that glibc's malloc reserves for each thread
_STACK = 8 * 2**20  # bytes, where the limit says nothing


def leader_threads() -> int:
    """Return how many threads a group leader has."""
    cores = os.cpu_count() or _POOL[0]
    return _LEADER_THREADS + min(max(cores, _POOL[0]), _POOL[-1])


def check(threads: int, purpose: str) -> None:
    """Refuse to begin what would find no room for its threads.

    Args:
        threads: How many it will start.
        purpose: Who wants to do what: "[cluster] rank 0: cannot call the group leader".

    Raises:
        JoinError: Too little is left.
    """
    most, hard = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # there is no /proc: nobody knows
        return
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    needed = threads * (_ARENA + (_STACK if stack == resource.RLIM_INFINITY else stack))
    if most - mapped < needed:
        raised = "raise it with ulimit -v" if hard != most else "have its administrator raise it"
        raise JoinError(
            f"{purpose}: gRPC's threads need {needed >> 20} MiB of address space, but "
            f"{max(0, most - mapped) >> 20} MiB are left of the {most >> 20} MiB that ulimit -v "
            f"allows; {raised}"
        )
