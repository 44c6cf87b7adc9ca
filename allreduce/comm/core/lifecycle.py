"""Close the open transports at the program's end, and detach them in a forked child."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

from allreduce.cluster import failure
from allreduce.cluster.process import exit_hooks
from allreduce.cluster.process.traces import summary
from allreduce.comm.core.transport import DeviceTransport, Transport
from allreduce.errors import is_interrupt

# By id. Listing the references is atomic in the interpreter, so other threads may open and free
# communicators meanwhile; iterating over a WeakSet is not.
_transports: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()


def add(transport: Transport) -> None:
    """Have the transport close at the program's end, even with started calls."""
    _transports[id(transport)] = transport
    exit_hooks.hook()


def remove(transport: Transport) -> None:
    """Forget a closed transport; remove the exit hooks with the last one."""
    _transports.pop(id(transport), None)
    if not _transports:
        exit_hooks.unhook()


def any_open() -> bool:
    """Return whether any transport is open."""
    return bool(_transports)


def _open_transports() -> list[Transport]:
    found = (reference() for reference in _transports.valuerefs())
    return [one for one in found if one is not None]


def _abort_all(reason: str) -> None:
    """Send the peers the error that ends this program, whose exit may take a while."""
    for transport in _open_transports():
        transport.abort(f"its program ended with {reason}", interrupted=exit_hooks.interrupted())


exit_hooks.on_failure(_abort_all)


def end_block(transport: Transport, error: BaseException) -> None:
    """Send the peers the error by which a `with` block of a communicator ends."""
    if not isinstance(error, Exception | KeyboardInterrupt):  # sys.exit(0) is none
        return
    exit_hooks.prepare(error)  # nobody does once the last communicator is closed
    if not transport.dead:
        reason = f"its `with` block ended with {summary(error)}"
        transport.abort(reason, interrupted=is_interrupt(error))


def drain_devices(transports: Sequence[Transport]) -> None:
    """Wait for calls on devices: peers may still be in them, and closing would end theirs, too.

    Members of one process begin to leave together, as each one's `close` waits for the others.
    """
    for transport in transports:
        if isinstance(transport, DeviceTransport):
            transport.drain()


def leave_all() -> None:
    """Close all transports, so that peers see a normal end and not a death."""
    if failure():
        _abort_all(failure())
    drain_devices(_open_transports())
    for transport in _open_transports():
        transport.close(drain=False)


exit_hooks.before_exit(leave_all)


def _after_fork() -> None:
    for transport in _open_transports():
        transport.close_inherited()
    _transports.clear()


os.register_at_fork(after_in_child=_after_fork)
