"""All hierarchical transports of this process: who waits for one drives them all."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from allreduce.comm.core import progress


class Driven(Protocol):
    """A transport, as it is driven here."""

    def drive(self) -> bool: ...


_transports: weakref.WeakSet[Driven] = weakref.WeakSet()
_lock = threading.RLock()  # held to look at these: other threads may add to them


def add(transport: Driven) -> None:
    """Drive a transport for as long as it lives."""
    with _lock:
        _transports.add(transport)


def drive() -> bool:
    """Do what can be done of all calls of this process; returns whether some are under way."""
    with _lock:
        transports = list(_transports)
    busy = [transport.drive() for transport in transports]
    return any(busy)


progress.drivers.append(drive)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
