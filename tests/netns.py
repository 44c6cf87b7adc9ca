"""Several hosts on this machine: network namespaces, joined by a bridge in one of their own.

What the machine itself has is left alone: no address, route or interface of its own changes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_PREFIX = "allreduce-test"
_made = itertools.count()
_SECONDS = 20  # for one command of iproute2
PORT = 29000  # of the leader: in a namespace of its own every port is free


@dataclass(frozen=True)
class Host:
    """One namespace with one interface, eth0."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs another here."""
        return ["ip", "netns", "exec", self.name, *words]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts that reach each other, or skip the test with what is missing; removed in any case.

    A test that was killed leaves its own, which the next one removes.
    """
    if why := _missing():
        pytest.skip(why)
    remove_leftovers()
    base = f"{_PREFIX}-{os.getpid()}-{next(_made)}"  # other hosts may be there at the same time
    switch = f"{base}-switch"
    made = [Host(f"{base}-{i}", f"10.77.0.{i + 1}") for i in range(count)]
    names = [switch, *(host.name for host in made)]
    try:
        _ip("".join(f"netns add {name}\n" for name in names))
        for name in names:
            _ip("link set lo up\n", name)
        _ip("link add bridge type bridge\nlink set bridge up\n", switch)
        for i, host in enumerate(made):
            peer = f"peer name eth0 netns {host.name}"
            port = f"link set port{i} master bridge up\n"
            _ip(f"link add port{i} type veth {peer}\n{port}", switch)
            _ip(f"addr add {host.address}/24 dev eth0\nlink set eth0 up\n", host.name)
        yield made
    finally:
        for name in names:
            _remove(name)


def explicit_ranks(made: list[Host], per_host: int) -> list[tuple[Host, dict[str, str]]]:
    """Return each rank's host, and the variables that make it a rank of one job."""
    size = len(made) * per_host
    own = {
        "ALLREDUCE_SIZE": str(size),
        "ALLREDUCE_LEADER": f"{made[0].address}:{PORT}",
        "ALLREDUCE_SECRET": "known to these ranks",
    }
    return [(made[rank // per_host], {**own, "ALLREDUCE_RANK": str(rank)}) for rank in range(size)]


def _missing() -> str:
    """Say what keeps namespaces from being made here; nothing if they can be."""
    if shutil.which("ip") is None:
        return "needs iproute2's ip"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"needs network namespaces: {made.stderr.strip()}"
    bridge = ["ip", "-n", probe, "link", "add", "bridge", "type", "bridge"]
    linked = subprocess.run(bridge, capture_output=True, text=True, timeout=_SECONDS)
    _remove(probe)
    return f"needs bridges: {linked.stderr.strip()}" if linked.returncode else ""


def _ip(script: str, name: str | None = None) -> None:
    command = ["ip", *(["-n", name] if name else []), "-batch", "-"]
    subprocess.run(command, input=script, text=True, check=True, timeout=_SECONDS)


def _remove(name: str) -> None:
    """Remove a namespace, and whatever still runs in it."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_SECONDS)


def remove_leftovers() -> None:
    """Remove the hosts of tests that have died."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, pid in re.findall(rf"^({_PREFIX}-(\d+)-[\w-]+)", listed, re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            _remove(name)
