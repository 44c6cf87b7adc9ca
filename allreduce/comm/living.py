"""What is in use of communicators, for two moments: the program's end, and a fork."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol, TypeVar

from allreduce.cluster import failure
from allreduce.comm import attendant
from allreduce.comm.base import Transport


class Leaver(Protocol):
    """What is to tell others that this process is at its end."""

    def leave(self) -> None: ...


_One = TypeVar("_One")

# By id. Other threads may open communicators, and free them, while the references are listed, which
# is one step of the interpreter's; a set of weak references could not be gone through meanwhile.
_transports: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()
_leavers: weakref.WeakValueDictionary[int, Leaver] = weakref.WeakValueDictionary()


def add(transport: Transport) -> None:
    """Have the transport leave in good order at the program's end, whatever is still started."""
    _transports[id(transport)] = transport


def add_leaver(leaver: Leaver) -> None:
    """Have it leave at the end of a program that ends well."""
    _leavers[id(leaver)] = leaver


def some() -> bool:
    """Say whether there are any."""
    return bool(_transports)


def _living(known: weakref.WeakValueDictionary[int, _One]) -> list[_One]:
    found = (reference() for reference in known.valuerefs())
    return [one for one in found if one is not None]


@atexit.register
def leave_all() -> None:
    """Tell the peers that this program has come to its end: it has not died."""
    attendant.leave()
    for transport in _living(_transports):
        if failure():
            transport.abort(f"its program ended with {failure()}")
        transport.close(drain=False)
    for leaver in [] if failure() else _living(_leavers):
        leaver.leave()


def _after_fork() -> None:
    for transport in _living(_transports):
        transport.close_inherited()
    _transports.clear()
    _leavers.clear()


os.register_at_fork(after_in_child=_after_fork)
