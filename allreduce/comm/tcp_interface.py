"""Which of this machine's addresses the other members can reach."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct

from allreduce import settings
from allreduce.cluster import World
from allreduce.errors import UsageError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("256s")


def address(world: World) -> str:
    """Choose the address to listen on: an interface's IPv4 address, or any address that is set.

    `ALLREDUCE_TCP_INTERFACE` decides where it is set. Otherwise: the address by which the leader is
    reached, if that is not on this machine alone; loopback if all members are on one host; the
    address by which a member on another host is reached.

    Raises:
        UsageError: The interface is gone, or no address can be found.
    """
    read = settings.load()
    where = f"[tcp] rank {world.rank}"
    if read.tcp_interface is not None:
        return _named(read.tcp_interface, where)
    if read.leader is not None:
        local = _towards(read.leader.rpartition(":")[0].strip("[]"))
        if local is not None and not ipaddress.ip_address(local).is_loopback:
            return local
    own = world.members[world.rank].host
    others = sorted({member.host for member in world.members if member.host != own})
    if not others:
        return LOOPBACK
    for host in others:
        local = _towards(host)
        if local is not None and not ipaddress.ip_address(local).is_loopback:
            return local
    raise UsageError(
        f"{where}: no address by which {', '.join(others[:3])} could be reached; set "
        "ALLREDUCE_TCP_INTERFACE to the interface, or to this host's address on it"
    )


def _named(name: str, where: str) -> str:
    """Return the address of an interface, or the address itself if this machine has it."""
    with contextlib.suppress(ValueError):
        wanted = ipaddress.ip_address(name)
        family = socket.AF_INET if wanted.version == 4 else socket.AF_INET6
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((name, 0))
        except OSError as error:
            raise UsageError(
                f"{where}: ALLREDUCE_TCP_INTERFACE={name!r} is no address of this host "
                f"({error}); there are {_listed()}"
            ) from error
        return str(wanted)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = array.array("B", _REQUEST.pack(name.encode()[:15]))
        try:
            fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise UsageError(
                f"{where}: ALLREDUCE_TCP_INTERFACE={name!r} is no interface with an IPv4 address "
                f"({error}); there are {_listed()}"
            ) from error
    return socket.inet_ntoa(request.tobytes()[20:24])


def _listed() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


def _towards(host: str) -> str | None:
    """Return the local address of the route to a host; nothing is sent."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:  # it does not resolve, or there is no route
        return None
