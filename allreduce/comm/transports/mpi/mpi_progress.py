"""MPI's one entrance: who waits drives all transports of the process."""

from __future__ import annotations

import threading
from typing import Protocol

from allreduce import _native
from allreduce.comm.core import progress

# Held in MPI: not every library lets several threads in. A communicator that the collector finds
# meanwhile is left by the thread that has it.
entered = threading.RLock()


class Driven(Protocol):
    """A transport, as it is driven here."""

    @property
    def moving(self) -> bool: ...
    @property
    def busy(self) -> bool: ...
    @property
    def admits(self) -> bool: ...
    def advance(self) -> None: ...


_turns = 0  # how often somebody has been in MPI to drive calls
_open: list[Driven] = []
_abandoned: list[Driven] = []  # dead with calls started: MPI may still write to their arrays


def add(transport: Driven) -> None:
    """Drive a transport from now on."""
    _open.append(transport)


def remove(transport: Driven, unfinished: bool) -> None:
    """Drive it no more; keep its arrays for ever if MPI may still touch them."""
    _open.remove(transport)
    if unfinished:
        _abandoned.append(transport)


def drive() -> None:
    """Perform this process's share of all started calls, over all communicators."""
    global _turns
    with entered:
        for transport in tuple(_open):
            if transport.busy:
                _turns += 1
                transport.advance()
    _native.progress()


def turns() -> int:
    """Return how often somebody was in MPI for that: it tells whether somebody is now."""
    return _turns


def _go_on() -> bool:
    """As `drive`, where MPI may be entered; returns whether calls are under way there."""
    transports = tuple(_open)
    if not all(transport.admits for transport in transports):
        return False
    drive()
    return any(transport.busy for transport in transports)


progress.drivers.append(_go_on)


def moving() -> bool:
    """Say whether bytes are on their way, which advance with our polls only."""
    return any(transport.moving for transport in tuple(_open))
