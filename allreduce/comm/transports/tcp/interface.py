"""Which of this machine's addresses the other members can reach."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from allreduce import settings
from allreduce.cluster import World
from allreduce.cluster.host.address import LOOPBACK, is_loopback
from allreduce.cluster.host.interfaces import named, towards_any
from allreduce.errors import UsageError

NO_FILES = (errno.EMFILE, errno.ENFILE)  # of the process; of the system


def address(world: World) -> str:
    """Choose the address to listen on: an interface's IPv4 address, or any address that is set.

    `ALLREDUCE_TCP_INTERFACE` decides where it is set. Otherwise: the address by which the leader is
    reached, if that is not on this machine alone; loopback if all members are on one host; the
    address by which a member on another host is reached.

    Raises:
        UsageError: The interface is gone, or no address can be found.
    """
    read = settings.load()
    where = f"[tcp] rank {world.members[world.rank].world_rank}"
    if read.tcp_interface is not None:
        return named(read.tcp_interface, where)
    if not is_loopback(world.address):
        return world.address
    own = world.members[world.rank].host
    others = sorted({member.host for member in world.members if member.host != own})
    if not others:  # and the leader was reached over loopback: they share its network
        return LOOPBACK
    local = towards_any(others)
    if local is None:
        raise UsageError(
            f"{where}: no address by which {', '.join(others[:3])} could be reached; set "
            "ALLREDUCE_TCP_INTERFACE to the interface, or to this host's address on it"
        )
    return local


def stream(address: str) -> socket.socket:
    """Make a TCP socket that can listen on an address, or reach it.

    On loopback it sends without pacing. BBR (Cardwell et al. 2016, section 3), which a host may
    have as its default, finds out at what pace a network takes data; between processes of one host
    it only costs: all_reduce of 64 MiB, 2 processes, 29 ms, and 20 with CUBIC.
    """
    found = ipaddress.ip_address(address)
    family = socket.AF_INET if found.version == 4 else socket.AF_INET6
    made = socket.socket(family, socket.SOCK_STREAM)
    if found.is_loopback:
        with contextlib.suppress(OSError):  # a host without CUBIC keeps what it has
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return made


def remedy(error: OSError) -> str:
    """Say what to do when an address cannot be listened on, or reached, or has no descriptor."""
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return (
            "no port is free, or the address is not this host's any more: widen "
            "net.ipv4.ip_local_port_range, or name another in ALLREDUCE_TCP_INTERFACE"
        )
    if error.errno in NO_FILES:
        return "raise its limit with ulimit -n"
    return "set ALLREDUCE_TCP_INTERFACE to an interface that is up and connects the hosts"
