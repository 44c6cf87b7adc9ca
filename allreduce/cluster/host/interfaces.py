"""This machine's network addresses, and which of them other hosts can reach."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from allreduce import settings
from allreduce.cluster.host.address import LOOPBACK, is_loopback
from allreduce.errors import UsageError

_SIOCGIFADDR = 0x8915  # netdevice(7)
_SIOCGIFNETMASK = 0x891B
_REQUEST = struct.Struct("256s")


class Interface(NamedTuple):
    """A network that this machine is on."""

    name: str
    address: str  # IPv4
    mask: str

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"{self.address}/{self.mask}", strict=False)


def interfaces() -> list[Interface]:
    """List this machine's IPv4 interfaces, without loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address, or is gone again
                address = _ask(probe, _SIOCGIFADDR, name)
                mask = _ask(probe, _SIOCGIFNETMASK, name)
                if not ipaddress.ip_address(address).is_loopback:
                    found.append(Interface(name, address, mask))
    return found


def reachable(
    mine: Sequence[Interface],
    others: Sequence[Sequence[Interface]],
    route: Callable[[str], str | None],
) -> str | None:
    """Choose the address of this host by which all other hosts can reach it.

    Args:
        mine: This host's interfaces.
        others: Each other host's.
        route: Returns the local address of the route to another; `source_address`.

    Returns:
        An address on a network that all hosts are on; else one that routes to the others start
        from; else None. An address that another host has, too, is a private bridge's (Docker's,
        libvirt's): no way to anywhere.
    """
    theirs = {one.address for host in others for one in host}
    own = [one for one in mine if one.address not in theirs]
    for one in own:
        if all(any(_in(other, one) for other in host) for host in others):
            return one.address
    for address in sorted(theirs - {one.address for one in mine}):
        local = route(address)
        if local is not None and any(one.address == local for one in own):
            return local
    return None


def named(name: str, where: str) -> str:
    """Return the IPv4 address of an interface, or the address itself if this machine has it.

    Args:
        name: The value of `ALLREDUCE_TCP_INTERFACE`.
        where: The message's beginning.

    Raises:
        UsageError: It is neither.
    """
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
        try:
            return _ask(probe, _SIOCGIFADDR, name)
        except OSError as error:
            raise UsageError(
                f"{where}: ALLREDUCE_TCP_INTERFACE={name!r} is no interface with an IPv4 address "
                f"({error}); there are {_listed()}"
            ) from error


def source_address(host: str) -> str | None:
    """Return the local address of the route to a host; nothing is sent."""
    if host == LOOPBACK:  # to look it up would import the codec of international names
        return host
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:  # it does not resolve, or there is no route
        return None


def any_source_address(hosts: Iterable[str]) -> str | None:
    """Return the local address of the first route to one of these hosts that leaves this one."""
    routes = (source_address(host) for host in hosts)
    return next((local for local in routes if local is not None and not is_loopback(local)), None)


def leaders_address(machines: Sequence[str], hosts: Sequence[Sequence[Interface]]) -> str:
    """Choose where rank 0 hosts the leader of a job whose ranks a launcher has spread.

    Args:
        machines: The identity of each rank's host.
        hosts: Each rank's interfaces.

    Raises:
        UsageError: No network connects the hosts, or this host lacks the interface that is set.
    """
    if len(set(machines)) == 1:
        return LOOPBACK
    wanted = settings.load().tcp_interface
    if wanted is not None:
        return named(wanted, "[cluster] rank 0")
    others = [host for host, machine in zip(hosts, machines, strict=True) if machine != machines[0]]
    found = reachable(hosts[0], others, source_address)
    if found is None:
        raise UsageError(
            "[cluster] rank 0: no address by which the other hosts could reach this one; set "
            "ALLREDUCE_TCP_INTERFACE to the interface, or to this host's address on it; there are "
            f"{_listed()}"
        )
    return found


def _in(other: Interface, one: Interface) -> bool:
    return other.address != one.address and ipaddress.ip_address(other.address) in one.network


def _ask(probe: socket.socket, code: int, name: str) -> str:
    request = array.array("B", _REQUEST.pack(name.encode()[:15]))
    fcntl.ioctl(probe.fileno(), code, request)
    return socket.inet_ntoa(request.tobytes()[20:24])


def _listed() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())
