"""This host: evidence of which it is, that processes compare, and what it says of its processes."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from allreduce import settings

STOPPED = "is stopped"
STATES = {  # by the kernel's letter (proc(5))
    "T": f"{STOPPED}, by a signal: kill -CONT lets it go on",
    "t": f"{STOPPED}, by a debugger",
    "Z": "is dead",
    "X": "is dead",
}


def identity() -> str:
    """Return what is equal for two processes that can share memory, and hardly ever for others.

    Memory is passed over abstract Unix sockets, which reach as far as the network namespace does:
    so that and the running kernel decide. Neither is proof (a cloned virtual machine has its
    original's boot id, and all have one number for their first namespace), hence the host's name
    as well, for which `ALLREDUCE_HOST` can stand. The proof is the handshake of those who share.
    """
    name = settings.load().host or socket.gethostname()
    return "/".join((_boot(), _network(), name))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a container may hide it
        return "unknown boot"


def _network() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return "unknown network"


def process_state(pid: int) -> str:
    """Say whether a process of this host lives, or is stopped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            letter = stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return f"process {pid}" if _exists(pid) else f"process {pid} is dead"
    return f"process {pid} {STATES.get(letter, 'is alive')}"


def _exists(pid: int) -> bool:
    """Say whether there is such a process, also where /proc is hidden."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def debugger_of_dead(pid: int) -> int:
    """Return who keeps a dead process from its parent's wait, by debugging it; 0 if nobody does."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it is gone, or hidden from us
        return 0
    told = dict(line.split(":", 1) for line in lines)
    dead = told["State"].split()[0] == "Z"
    return int(told["TracerPid"]) if dead else 0


def children(pid: int) -> list[int]:
    """List a process's children; none if it has ended, or is hidden."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found += map(int, listed.read_text().split())
    return found


def mapped(pid: int | str) -> list[str]:
    """List the files that a process has mapped."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended
        return []
    return [line[line.index("/") :] for line in text.splitlines() if "/" in line]
