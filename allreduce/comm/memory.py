"""Memory that processes share, allocated before anybody maps it.

Touching a page of a mapped file for which there is no memory ends the process with SIGBUS; so all
pages are allocated first, and a shortage is an ordinary error. Files are anonymous memfds: the
kernel frees them with the last process that holds or maps them, whatever ended it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return how much memory this process could have, by the kernel's estimate and its limits."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return min(available, _cgroup_headroom())


def _cgroup_headroom() -> int:
    """Return what this process's control groups (version 2) leave, of all groups above it."""
    headroom = 1 << 62
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return headroom
    own = next((entry[3:] for entry in entries if entry.startswith("0::")), "/")
    group = _CGROUP / own.lstrip("/")
    for level in (group, *group.parents):
        if level == _CGROUP.parent:
            break
        try:
            limit = (level / "memory.max").read_text().strip()
            used = int((level / "memory.current").read_text())
        except (OSError, ValueError):  # the root group, or one outside this container, has no limit
            continue
        if limit != "max":
            headroom = min(headroom, int(limit) - used)
    return headroom


def check_available(nbytes: int) -> None:
    """Refuse what the machine cannot have: the kernel would kill a process to make room for it.

    Raises:
        OSError: There is less memory (ENOMEM).
    """
    available = available_bytes()
    if nbytes > available:
        raise OSError(errno.ENOMEM, f"{nbytes} bytes are needed, {available} are available")


def allocate(nbytes: int) -> int:
    """Return the descriptor of a new anonymous file whose `nbytes` are all allocated and zero.

    Raises:
        OSError: There is no memory for it, or no descriptor left.
    """
    check_available(nbytes)
    fd = os.memfd_create("allreduce", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
