"""Where a group leader may listen: loopback freely, another interface with a secret only."""

from __future__ import annotations

import errno
import ipaddress
import socket

from allreduce.errors import JoinError, UsageError

LOOPBACK = "127.0.0.1"


def split(address: str) -> tuple[str, int]:
    """Take `host:port` apart; `[::1]:port` for IPv6.

    Raises:
        UsageError: An IPv6 address is without brackets: its end would be taken for the port.
    """
    host, _, port = address.rpartition(":")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise UsageError(
            f"[cluster] the leader's address {address!r} is not valid: write an IPv6 address in "
            "brackets, as in [::1]:5000"
        )
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """Write `host:port`; `[host]:port` for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether every address of `host` reaches this machine only.

    Raises:
        JoinError: The name does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise JoinError(
            f"[cluster] the host {host!r} does not resolve ({error}); check "
            "ALLREDUCE_LEADER, or the cluster's addresses"
        ) from error
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)


def check_secret(address: str, secret: bytes) -> None:
    """Refuse to meet over a network without a secret.

    Raises:
        UsageError: `address` is not loopback and `secret` is empty.
    """
    if not secret and not is_loopback(split(address)[0]):
        raise UsageError(
            f"[cluster] the leader {address} is not on the loopback interface, and the job has no "
            "secret: anybody on the network could join; set ALLREDUCE_SECRET to the same random "
            "text on all ranks"
        )


def check_loopback(address: str) -> None:
    """Refuse to meet over a loopback interface that is down, as in a new network namespace.

    Raises:
        JoinError: `address` is on it, and it is. Otherwise nothing would answer there.
    """
    host = split(address)[0]
    try:
        if not ipaddress.IPv4Address(host).is_loopback:
            return
    except ValueError:  # a name, or IPv6
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # which sends nothing
        except OSError as error:
            raise JoinError(
                f"[cluster] this host does not reach itself at {host} ({error.strerror}): its "
                "loopback interface is down; bring it up with ip link set lo up"
            ) from error


def unresolved(address: str) -> str:
    """Say that the name in `host:port` does not resolve, and why; nothing if it does."""
    host = split(address)[0]
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"{host} cannot be resolved: {error.strerror}"
    return ""


def unbound(address: str) -> str:
    """Say why no server can listen at `host:port`: gRPC's errors do not."""
    if why := unresolved(address):
        return why
    family, kind, _, _, where = socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return str(error.strerror)
    return "the address is in use, or not of this machine"


def unanswered(address: str, who: str) -> str:
    """Say why `who` has not answered at `host:port`."""
    try:
        socket.create_connection(split(address), timeout=1).close()
    except OSError:
        return unresolved(address) or f"no {who} answers at {address}"
    return f"the program that listens at {address} does not answer as a {who} does"
