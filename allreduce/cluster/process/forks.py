"""Close a forked child's copies of its parent's connections to the group leader.

A connection lives as long as any process holds it open: with a child that outlives its parent, the
leader would learn of the parent's death only when its heartbeats are missed. gRPC marks its sockets
to be closed on exec; a fork leaves them open.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import weakref
from typing import Protocol

from allreduce.cluster.host import limits
from allreduce.cluster.host.address import split

_End = tuple[str, int]  # an address without brackets or zone, and a port


class SocketOwner(Protocol):
    """The owner of sockets to the leader's `host:port`."""

    address: str


_connected: weakref.WeakKeyDictionary[SocketOwner, frozenset[_End]] = weakref.WeakKeyDictionary()


def hold(connected: SocketOwner) -> None:
    """Close this one's sockets in children that are forked from now on.

    A name is resolved now, because a child must not: another thread may have been at it.
    """
    _connected[connected] = _ends(connected.address)


def release(connected: SocketOwner) -> None:
    """Forget one that has closed its sockets."""
    _connected.pop(connected, None)


def _ends(address: str) -> frozenset[_End]:
    """Return the addresses that `host:port` stands for; none if the name does not resolve."""
    host, port = split(address)
    try:
        return frozenset({(_plain(host), port)})
    except ValueError:  # a name
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return frozenset((_plain(str(entry[4][0])), port) for entry in found)
    return frozenset()


def _plain(host: str) -> str:
    """Write an address in one form: gRPC's IPv6 sockets speak IPv4, too."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _after_fork() -> None:
    leaders = frozenset().union(*_connected.values())
    _connected.clear()
    if not leaders:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in limits.opened():
        if _reaches(fd, leaders):
            os.dup2(nothing, fd, inheritable=False)  # gRPC may yet close that number
    os.close(nothing)


def _reaches(fd: int, leaders: frozenset[_End]) -> bool:
    """Return whether one end of a TCP socket is a leader's; not for anything else."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    try:
        ours = socket.socket(fileno=fd)
    except OSError:  # of a family without addresses
        return False
    found = False
    if ours.family in (socket.AF_INET, socket.AF_INET6):
        for end, local in ((ours.getsockname, True), (ours.getpeername, False)):
            with contextlib.suppress(OSError):  # it listens, and has no peer
                host, port = end()[:2]
                found = found or _is_leaders(_plain(host), port, leaders, local=local)
    ours.detach()
    return found


def _is_leaders(host: str, port: int, leaders: frozenset[_End], *, local: bool) -> bool:
    """Compare one end; a leader that listens everywhere is at all addresses of this machine."""
    if (host, port) in leaders:
        return True
    here = local or ipaddress.ip_address(host).is_loopback
    return here and any((every, port) in leaders for every in ("0.0.0.0", "::"))


os.register_at_fork(after_in_child=_after_fork)
