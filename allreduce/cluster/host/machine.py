"""This host: an identity that processes compare, and the state of its processes."""

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
    """Return a text that is equal for processes that can share memory, and rarely for others.

    Shared memory is passed over abstract Unix sockets, so processes need the same kernel and
    network namespace. Neither id is proof: a cloned virtual machine keeps its original's boot id,
    and first namespaces have the same number everywhere. Hence the host's name, or
    `ALLREDUCE_HOST`, is included. The handshake of the shared transport is the proof.
    """
    name = settings.load().host or socket.gethostname()
    return "/".join((_boot_id(), _network(), name))


def _boot_id() -> str:
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
    """Describe a process of this host: alive, stopped or dead."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            letter = stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return f"process {pid}" if _exists(pid) else f"process {pid} is dead"
    return f"process {pid} {STATES.get(letter, 'is alive')}"


def _exists(pid: int) -> bool:
    """Return whether the process exists, also if /proc is hidden."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def debugger_of_ended(pid: int) -> int:
    """Return the debugger that keeps a dead process from being reaped; 0 if none does."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it is gone, or hidden from us
        return 0
    status = dict(line.split(":", 1) for line in lines)
    dead = status["State"].split()[0] == "Z"
    return int(status["TracerPid"]) if dead else 0


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
