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
from allreduce.comm.core.transport import Work
from allreduce.comm.registry import open_members, opener
from allreduce.errors import UsageError

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
    """What this process has joined; a process made by fork starts with nothing."""

    pid: int = field(default_factory=os.getpid)
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)  # of all calls, merged
    facts: dict[str, Any] = field(default_factory=dict, repr=False)  # and what they left open
    world: World | None = None
    communicator: Communicator | None = None
    names: Counter[str] = field(default_factory=Counter)  # how often each was used in this world


_IDENTITY = ("rank", "size", "leader", "secret")  # what makes another world if it differs
_state = _State()
_lock = threading.RLock()


def _renew() -> None:
    """In a child made by fork: another thread of the parent may have been in the middle of it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)


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

    Blocks until all ranks have called. Called again it returns the same communicator, also a dead
    one; after its `close()` it makes a new one, and only another rank, size, leader or secret
    leaves the world.
    What is left out is as it was, or read from `ALLREDUCE_<NAME>`.

    Args:
        rank: This process's rank.
        size: How many ranks the job has.
        leader: `host:port` of the group leader.
        secret: What all ranks have to know.
        transport: What carries collectives: "shared" (one host), "hierarchical" (several), "tcp" or
            "mpi". Without it, "shared" or "hierarchical", as the ranks' hosts ask for.
        timeout: Seconds that joining, and any wait, may last; 300 without it.

    Raises:
        UsageError: An argument is wrong, or differs from the first call's.
        JoinError: The job cannot be joined.
        UnsupportedError: The ranks are spread over hosts that the transport does not connect.
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
    """Return the world that `init` joined, or join it: its communicator is not made yet."""
    with _lock:
        return _join(_current(), {})


def replica_communicators(
    world: World, local_replicas: int, *, name: str, timeout: float | None = None
) -> list[Communicator]:
    """Make a communicator of one member per replica; a collective call of the processes.

    Members are numbered through ranks, then through the replicas of each. Each of the communicators
    returned is for one thread; threads of one process and processes mix freely.

    Args:
        world: Whose processes take part; a world of one needs nobody else.
        local_replicas: How many replicas this process has; may differ between processes.
        name: What it is for; the same on all ranks.
        timeout: Seconds that making it, and any wait, may last; as for `init` without it.

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
    asked = state.arguments | given
    transport = _transport(asked, read)
    if state.world is not None and any(_differs(state, given, name) for name in _IDENTITY):
        state.world.close()
        state.world = None
        state.names.clear()
    joined = _join(state, given)
    seconds = asked.get("timeout", read.timeout)
    name = _fresh(state, "world")
    made = open_members(transport, joined, 1, name=name, timeout=seconds)[0]
    state.facts |= {"transport": made.transport, "timeout": seconds}
    return made


def _transport(asked: dict[str, Any], read: settings.Settings) -> str | None:
    """Return the transport's name, or say what is wrong with it before anybody meets."""
    named = asked.get("transport")
    opener(named or read.transport, "" if named else "ALLREDUCE_TRANSPORT")
    return named or read.transport


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given, as their variables' values would be read."""
    return {
        name: settings.check(name.upper(), value)
        for name, value in arguments.items()
        if value is not None
    }


def _join(state: _State, given: dict[str, Any]) -> World:
    """Return the world, joined if need be; what the caller leaves out is as it was."""
    before, state.arguments = state.arguments, state.arguments | given
    if state.world is None:
        asked = {name: value for name, value in state.arguments.items() if name != "transport"}
        try:
            state.world = join(**asked)
        except UsageError:  # any other failure may pass: the next attempt is for the same world
            state.arguments = before
            raise
        read = settings.load()
        state.facts = {"leader": read.leader, "secret": read.secret} | asked
        state.facts |= {"rank": state.world.rank, "size": state.world.size}
    return state.world


def _differs(state: _State, given: dict[str, Any], name: str) -> bool:
    return name in given and given[name] != state.facts.get(name)


def _fresh(state: _State, name: str) -> str:
    """Return a name that is new in this world, and the same on all ranks that call in one order."""
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
