"""All hierarchical transports of this process: who waits for one drives them all."""

from __future__ import annotations

import weakref
from typing import Protocol


class Driven(Protocol):
    """A transport, as it is driven here."""

    def drive(self) -> bool: ...


_transports: weakref.WeakSet[Driven] = weakref.WeakSet()


def add(transport: Driven) -> None:
    """Drive a transport for as long as it lives."""
    _transports.add(transport)


def drive() -> bool:
    """Do what can be done of all calls of this process; returns whether some are under way."""
    busy = [transport.drive() for transport in list(_transports)]
    return any(busy)
