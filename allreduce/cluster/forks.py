"""A child made by fork lets go of its parent's connections to the group leader.

A connection lives as long as any process holds it open: with a child that outlives its parent, the
leader would learn of the parent's death only when its heartbeats are missed. gRPC marks its sockets
to be closed on exec; a fork leaves them open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from typing import Protocol


class Connected(Protocol):
    """What has sockets of which one end is the leader's `host:port`."""

    address: str


_connected: weakref.WeakSet[Connected] = weakref.WeakSet()


def hold(connected: Connected) -> None:
    """Close this one's sockets in children that are forked from now on."""
    _connected.add(connected)


def release(connected: Connected) -> None:
    """Forget one that has closed its sockets."""
    _connected.discard(connected)


def _after_fork() -> None:
    ports = {int(each.address.rpartition(":")[2]) for each in _connected}
    _connected.clear()
    if not ports:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if ports & _ports(int(name)):
            os.dup2(nothing, int(name), inheritable=False)  # gRPC may yet close that number
    os.close(nothing)


def _ports(fd: int) -> set[int]:
    """Give the ports of a TCP socket's ends; none for anything else."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return set()
        ours = socket.socket(fileno=fd)
    except OSError:  # the listing's own, which is closed again
        return set()
    ports = set()
    if ours.family in (socket.AF_INET, socket.AF_INET6):
        for end in (ours.getsockname, ours.getpeername):
            with contextlib.suppress(OSError):  # it listens, and has no peer
                ports.add(end()[1])
    ours.detach()
    return ports


os.register_at_fork(after_in_child=_after_fork)
