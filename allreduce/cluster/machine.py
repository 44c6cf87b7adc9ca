"""Which host this process is on, as evidence that other processes can compare with their own."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from allreduce import settings


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
