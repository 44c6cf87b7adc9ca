"""Where a group leader may listen: loopback freely, another interface with a secret only."""

from __future__ import annotations

import ipaddress
import socket

from allreduce.errors import JoinError, UsageError

LOOPBACK = "127.0.0.1"


def split(address: str) -> tuple[str, int]:
    """Take `host:port` apart; `[::1]:port` for IPv6."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Say whether every address of `host` reaches this machine only.

    Raises:
        JoinError: The name does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise JoinError(
            f"[cluster] the leader's host {host!r} does not resolve ({error}); "
            "check ALLREDUCE_LEADER"
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


def outward_host() -> str:
    """Find the address by which other machines reach this one; no packet is sent.

    Raises:
        JoinError: There is no route to anywhere.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): only asks the routing table
        except OSError as error:
            raise JoinError(
                f"[cluster] the job spans several machines, but this one has no route ({error})"
            ) from error
        return str(probe.getsockname()[0])
