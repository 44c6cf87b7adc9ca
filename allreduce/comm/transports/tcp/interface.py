"""Choose the address of this machine that other members can reach."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from allreduce import settings
from allreduce.cluster import World
from allreduce.cluster.host.address import LOOPBACK, is_loopback
from allreduce.cluster.host.interfaces import any_source_address, named
from allreduce.errors import UsageError

NO_FILES = (errno.EMFILE, errno.ENFILE)  # of the process; of the system


def address(world: World) -> str:
    """Choose the address to listen on: an interface's IPv4 address, or any address that is set.

    `ALLREDUCE_TCP_INTERFACE` takes precedence. Otherwise: the address that reaches the leader, if
    it is not loopback; loopback if all members are on one host; the address that reaches a member
    on another host.

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
    if not others:  # the leader was reached over loopback, so they share its network
        return LOOPBACK
    local = any_source_address(others)
    if local is None:
        raise UsageError(
            f"{where}: no address reaches {', '.join(others[:3])}; set "
            "ALLREDUCE_TCP_INTERFACE to the interface, or to this host's address on it"
        )
    return local


def stream(address: str) -> socket.socket:
    """Make a TCP socket that can listen on an address, or reach it.

    On loopback it uses CUBIC. BBR (Cardwell et al. 2016, section 3), the default of some hosts,
    paces its sends, which only costs time on one host: all_reduce of 64 MiB, 2 processes, took
    29 ms, and 20 ms with CUBIC.
    """
    found = ipaddress.ip_address(address)
    family = socket.AF_INET if found.version == 4 else socket.AF_INET6
    made = socket.socket(family, socket.SOCK_STREAM)
    if found.is_loopback:
        with contextlib.suppress(OSError):  # a host without CUBIC keeps its default
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return made


def remedy(error: OSError) -> str:
    """Return the remedy for a failure to listen, to connect or to open a socket."""
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return (
            "no port is free, or this host lost the address: widen "
            "net.ipv4.ip_local_port_range, or name another in ALLREDUCE_TCP_INTERFACE"
        )
    if error.errno in NO_FILES:
        return "raise its limit with ulimit -n"
    return "set ALLREDUCE_TCP_INTERFACE to an interface that is up and connects the hosts"
