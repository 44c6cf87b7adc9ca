"""Check this process's limits on open files and address space before they are needed.

A process that runs out of descriptors midway leaves the others waiting, or does not receive a file
passed to it, and gRPC aborts or crashes. If `ulimit -v` leaves too little for a thread, gRPC
aborts without a message, or does not connect.
"""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

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


CHANNEL_THREADS = 4  # gRPC's and ours, to call a leader
_LEADER_THREADS = 7  # to host one, besides gRPC's pool: a thread per core
_POOL = range(2, 17)  # sizes of that pool
_ARENA = 64 * 2**20  # bytes that glibc's malloc reserves per thread
_STACK = 8 * 2**20  # bytes per thread, if its limit is infinite


def leader_threads() -> int:
    """Return how many threads a group leader starts."""
    cores = os.cpu_count() or _POOL[0]
    return _LEADER_THREADS + min(max(cores, _POOL[0]), _POOL[-1])


def check_address_space(threads: int, purpose: str) -> None:
    """Raise if the address space is too small for more threads.

    Args:
        threads: How many will be started.
        purpose: The rank and its purpose: "[cluster] rank 0: cannot call the group leader".

    Raises:
        JoinError: Too little remains.
    """
    most, hard = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc: unknown
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
