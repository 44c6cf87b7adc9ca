"""Collectives between the processes of a world, and between the replicas in them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from allreduce import settings
from allreduce.cluster import World, join
from allreduce.comm.calls.call import ANY, Call
from allreduce.comm.communicator import Communicator
from allreduce.comm.control_collectives import (
    adopt,
    begin_exchange,
    exchange,
    exchange_plain,
    total,
)
from allreduce.comm.core.work import Work
from allreduce.comm.device_sharing import share_devices
from allreduce.comm.registry import open_members, opener
from allreduce.errors import UnsupportedError, UsageError
from allreduce.keywords import explain

__all__ = [
    "ANY",
    "Call",
    "Communicator",
    "Work",
    "adopt",
    "begin_exchange",
    "exchange",
    "exchange_plain",
    "init",
    "replica_communicators",
    "total",
    "world",
]


@dataclass
class _State:
    """The world that this process joined; a forked child starts empty."""

    pid: int = field(default_factory=os.getpid)
    arguments: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # of all `init` calls, merged
    facts: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # resolved values of omitted arguments
    world: World | None = None
    communicator: Communicator | None = None
    names: Counter[str] = field(default_factory=Counter)  # how often each was used in this world


_IDENTITY = ("rank", "size", "leader", "secret")  # a different value means another world
_state = _State()
_lock = threading.RLock()


def _renew() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)


@explain()
def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    leader: str | None = None,
    secret: str | bytes | None = None,
    transport: str | None = None,
    timeout: float | None = None,
) -> Communicator:
    """Join the job and return the communicator with one member per process.

    Blocks until all ranks have called. A second call returns the same communicator, even a dead
    one; after `close()` it makes a new one. Only another rank, size, leader or secret leaves the
    world. Omitted arguments keep their value, or are read from `ALLREDUCE_<NAME>`.

    Args:
        rank: This process's rank.
        size: The number of ranks.
        leader: `host:port` of the group leader.
        secret: A secret that all ranks share.
        transport: "shared" (one host), "hierarchical" (several), "tcp", "mpi", or "nccl": for
            arrays on GPUs, with "shared" or "hierarchical" for those of the host. Default: "nccl"
            if this process has a GPU, otherwise "shared" or "hierarchical", by the number of hosts.
        timeout: Limit for joining and for any wait, in seconds; default: 300.

    Raises:
        UsageError: An argument is wrong, or differs from the first call's.
        JoinError: The job cannot be joined.
        UnsupportedError: The transport does not connect the ranks' hosts.
    """
    place = {"rank": rank, "size": size, "leader": leader, "secret": secret}
    given = _checked(place | {"transport": transport, "timeout": timeout})
    with _lock:
        state = _current()
        if state.communicator is None or state.communicator.closed:
            state.communicator = _open(state, given)
        else:
            _check_same(state, given)
        return state.communicator


def world() -> World:
    """Return the world that `init` joined, or join it without making a communicator."""
    with _lock:
        return _join(_current(), {})


def replica_communicators(
    world: World, local_replicas: int, *, name: str, timeout: float | None = None
) -> list[Communicator]:
    """Make a communicator of one member per replica; a collective call of the processes.

    Members are ordered by rank, then by replica. Each returned communicator is for one thread.

    Args:
        world: The processes.
        local_replicas: The number of replicas of this process; may differ between processes.
        name: A name for messages; the same on all ranks.
        timeout: Limit for the call and for any wait, in seconds; default: as for `init`.

    Returns:
        This process's communicators, in the order of its replicas.
    """
    if local_replicas < 1:
        raise UsageError(f"[comm] a communicator needs a replica, but got {local_replicas}")
    with _lock:
        asked = _current().arguments | _checked({"timeout": timeout})
        read = settings.load()
        transport = _transport(asked, read)
        unique = _fresh(_current(), name)
    seconds = asked.get("timeout", read.timeout)
    return open_members(transport, world, local_replicas, name=unique, timeout=seconds)


def _current() -> _State:
    global _state
    if _state.pid != os.getpid():
        _state = _State()
    return _state


def _open(state: _State, given: dict[str, Any]) -> Communicator:
    read = settings.load()
    before, asked = state.arguments, state.arguments | given
    if state.world is not None and any(_differs(state, given, name) for name in _IDENTITY):
        state.world.close()
        state.world = None
        state.names.clear()
    joined = _join(state, given)
    seconds = asked.get("timeout", read.timeout)
    try:
        transport = _transport(asked, read)  # once joined: ranks print an equal error once
        name = _fresh(state, "world")
        made = open_members(transport, joined, 1, name=name, timeout=seconds)[0]
    except (UsageError, UnsupportedError):  # after other errors a second attempt may succeed
        state.arguments = before
        raise
    state.facts |= {"transport": made.transport, "timeout": seconds}
    return made


def _transport(asked: dict[str, Any], read: settings.Settings) -> str | None:
    """Return the transport's name; raise if it is unknown."""
    named = asked.get("transport")
    opener(named or read.transport, "" if named else "ALLREDUCE_TRANSPORT")
    return named or read.transport


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments, checked as the values of their variables are."""
    return {
        name: settings.check(name.upper(), value)
        for name, value in arguments.items()
        if value is not None
    }


def _join(state: _State, given: dict[str, Any]) -> World:
    """Return the world, and join it if necessary; omitted arguments keep their values."""
    before, state.arguments = state.arguments, state.arguments | given
    if state.world is None:
        asked = {name: value for name, value in state.arguments.items() if name != "transport"}
        try:
            state.world = join(**asked)
        except UsageError:  # as in `_open`
            state.arguments = before
            raise
        read = settings.load()
        share_devices(state.world, state.arguments.get("timeout", read.timeout))
        state.facts = {"leader": read.leader, "secret": read.secret} | asked
        state.facts |= {"rank": state.world.rank, "size": state.world.size}
    return state.world


def _differs(state: _State, given: dict[str, Any], name: str) -> bool:
    return name in given and given[name] != state.facts.get(name)


def _fresh(state: _State, name: str) -> str:
    """Return a new name, the same on all ranks that call in the same order."""
    state.names[name] += 1
    return f"{name}.{state.names[name]}"


def _check_same(state: _State, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if _differs(state, given, name):
            had = state.facts.get(name)
            shown, known = f"{name}={value!r}", f"{name}={had!r}"
            if name == "secret":  # is not shown
                shown, known = "another secret", "its own"
            raise UsageError(
                f"[comm] rank {state.facts['rank']}: init() was called again with {shown}, but "
                f"this process joined with {known}; "
                "close() the communicator first, or call init() without arguments"
            )
