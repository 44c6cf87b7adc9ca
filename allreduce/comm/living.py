"""The transports in use, for two moments that concern them all: the program's end, and a fork."""

from __future__ import annotations

import atexit
import os
import weakref

from allreduce.cluster import failure
from allreduce.comm import attendant
from allreduce.comm.base import Transport

_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


def add(transport: Transport) -> None:
    """Have the transport leave in good order at the program's end, whatever is still started."""
    _transports.add(transport)


@atexit.register
def leave_all() -> None:
    """Tell the peers that this program has come to its end: it has not died."""
    attendant.leave()
    for transport in list(_transports):
        if failure():
            transport.abort(f"its program ended with {failure()}")
        transport.close(drain=False)


def _after_fork() -> None:
    for transport in list(_transports):
        transport.close_inherited()
    _transports.clear()


os.register_at_fork(after_in_child=_after_fork)
