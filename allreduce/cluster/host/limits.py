"""Check this process's limit on open files before they are needed.

A process that runs out of descriptors midway leaves the others waiting, or does not receive a file
passed to it, and gRPC aborts or crashes.
"""

from __future__ import annotations

import math
import os
import resource

from allreduce.errors import JoinError

_LEADER_FILES = 10  # opened by gRPC and its event loops to listen
CHANNEL_FILES = 5  # opened by gRPC to call a leader
_STRANGERS_PART = 0.25  # of the remaining files: a group needs some for each member
_MAX_PROBED = 2**16  # descriptors tried one by one if there is no /proc
_SPARE = 8  # for short-lived ones: listeners, strangers, files being passed


def leader_files(size: int) -> int:
    """Return how many files a group leader of `size` members opens."""
    return _LEADER_FILES + size


def shortage(needed: int) -> str:
    """Return why this process cannot open `needed` more files; "" if it can."""
    needed += _SPARE
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = _left(most)
    if left >= needed:
        return ""
    raised = "raise it with ulimit -n" if hard > most else "have its administrator raise it"
    return (
        f"it needs {needed} file descriptors, but {max(0, int(left))} are left of the {most} that "
        f"ulimit -n allows; {raised}"
    )


def max_unproven_connections(wanted: int) -> int:
    """Return how many strangers may connect: a part of the remaining files, at least 1."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(wanted, int(_left(most) * _STRANGERS_PART)))


def _left(most: int) -> float:
    """Return how many more files this process can open, of `most` in all."""
    if most == resource.RLIM_INFINITY:
        return math.inf
    try:
        return most - sum(fd < most for fd in opened())
    except OSError:  # none left for the listing itself
        return 0


def opened() -> list[int]:
    """List the open descriptors, also without /proc."""
    try:  # includes the listing's own, closed by now
        return [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)]
    except FileNotFoundError:
        return list(
            filter(_is_open, range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MAX_PROBED)))
        )


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def check_files(needed: int, purpose: str) -> None:
    """Raise if this process would run out of files.

    Args:
        needed: How many files it will open and keep.
        purpose: The rank and its purpose: "[cluster] rank 0: cannot host the group leader".

    Raises:
        JoinError: Too few remain.
    """
    if short := shortage(needed):
        raise JoinError(f"{purpose}: {short}")
