"""What is in use of communicators, for two moments: the program's end, and a fork."""

from __future__ import annotations

import os
import weakref

from allreduce.cluster import failure
from allreduce.cluster.process import exit_hooks
from allreduce.comm.core.transport import Transport

# By id. Other threads may open communicators, and free them, while the references are listed, which
# is one step of the interpreter's; a set of weak references could not be gone through meanwhile.
_transports: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()


def add(transport: Transport) -> None:
    """Have the transport leave in good order at the program's end, whatever is still started."""
    _transports[id(transport)] = transport
    exit_hooks.hook()


def remove(transport: Transport) -> None:
    """Forget a transport that has left; with the last one, the hooks for the program's end go."""
    _transports.pop(id(transport), None)
    if not _transports:
        exit_hooks.unhook()


def any_open() -> bool:
    """Say whether there are any."""
    return bool(_transports)


def _open_transports() -> list[Transport]:
    found = (reference() for reference in _transports.valuerefs())
    return [one for one in found if one is not None]


def _abort_all(reason: str) -> None:
    """Tell the peers at once by what error this program ends, which may take it a while."""
    for transport in _open_transports():
        transport.abort(f"its program ended with {reason}", interrupted=exit_hooks.interrupted())


exit_hooks.on_failure(_abort_all)


def leave_all() -> None:
    """Tell the peers that this program has come to its end: it has not died."""
    if failure():
        _abort_all(failure())
    for transport in _open_transports():
        transport.close(drain=False)


exit_hooks.before_exit(leave_all)


def _after_fork() -> None:
    for transport in _open_transports():
        transport.close_inherited()
    _transports.clear()


os.register_at_fork(after_in_child=_after_fork)
