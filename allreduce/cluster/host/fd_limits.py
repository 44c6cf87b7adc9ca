"""How many more files this process may open: asked before anything is begun that needs them.

A process that runs out of descriptors half-way leaves the others waiting for it, one that is passed
a file finds it missing, and gRPC ends the process, or crashes.
"""

from __future__ import annotations

import math
import os
import resource

from allreduce.errors import JoinError

_LEADER_FILES = 10  # that gRPC and its event loops open to listen
LINE_FILES = 5  # that gRPC opens to call a leader
_STRANGERS_PART = 0.25  # of the files that are left: a group needs some for each of its members
_MOST = 2**16  # that are tried one by one
_SPARE = 8  # for what comes and goes meanwhile: listeners, strangers, files that are passed on


def leader_files(size: int) -> int:
    """Return how many files a group leader of `size` members has open."""
    return _LEADER_FILES + size


def shortage(needed: int) -> str:
    """Say that this process cannot open so many files more; nothing if it can.

    Args:
        needed: How many files it will open and keep.
    """
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


def for_strangers(wanted: int) -> int:
    """Return how many files strangers may have open here: a part of what is left, and at least 1.

    Args:
        wanted: How many they may have where many are left.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(wanted, int(_left(most) * _STRANGERS_PART)))


def _left(most: int) -> float:
    """Return how many files more this process can open of the `most` that it may have."""
    if most == resource.RLIM_INFINITY:
        return math.inf
    try:
        return most - sum(fd < most for fd in opened())
    except OSError:  # not even one for the listing
        return 0


def opened() -> list[int]:
    """List the descriptors that are open, also where there is no /proc."""
    try:  # the listing's own is in it, and closed again
        return [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)]
    except FileNotFoundError:
        return list(
            filter(_is_open, range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST)))
        )


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def check(needed: int, purpose: str) -> None:
    """Refuse to begin what would run out of files.

    Args:
        needed: How many files it will open and keep.
        purpose: Who wants to do what: "[cluster] rank 0: cannot host the group leader".

    Raises:
        JoinError: There are too few left.
    """
    if short := shortage(needed):
        raise JoinError(f"{purpose}: {short}")
