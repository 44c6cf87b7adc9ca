"""Serialise all entries to MPI; any waiting thread drives all transports of the process."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from typing import Any, Protocol

from allreduce import _native
from allreduce.comm.core import progress
from allreduce.events import logger

# Held in MPI: not every library lets several threads in. A communicator that the collector finds
# meanwhile is left by the thread that has it.
entered = threading.RLock()


class DrivenTransport(Protocol):
    """The methods of a transport that this module drives."""

    @property
    def moving(self) -> bool: ...
    @property
    def busy(self) -> bool: ...
    @property
    def admits(self) -> bool: ...
    def advance(self) -> None: ...


_rounds = 0  # how often somebody has been in MPI to drive calls
_open: list[DrivenTransport] = []


def add(transport: DrivenTransport) -> None:
    """Drive a transport from now on."""
    _open.append(transport)


def remove(transport: DrivenTransport, unfinished: bool) -> None:
    """Stop driving it; keep its arrays for ever if MPI may still touch them.

    MPI_Finalize still writes to them, and it runs behind the interpreter, which frees what modules
    hold. Only an object with a reference that nobody drops outlives it.
    """
    _open.remove(transport)
    if unfinished:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport))


def drive() -> None:
    """Perform this process's share of all started calls, over all communicators."""
    global _rounds
    with entered:
        for transport in tuple(_open):
            if transport.busy:
                _rounds += 1
                transport.advance()
    _native.progress()


def _make_progress() -> bool:
    """As `drive`, where MPI may be entered; returns whether calls are under way there."""
    transports = tuple(_open)
    if not all(transport.admits for transport in transports):
        return False
    drive()
    return any(transport.busy for transport in transports)


progress.drivers.append(_make_progress)


def moving() -> bool:
    """Return whether bytes are on their way, which advance with our polls only."""
    return any(transport.moving for transport in tuple(_open))


# Seconds between polls while no thread is in MPI: short at first, so that a message is noticed
# soon, then long enough to cost a computing program nothing.
_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.001, 0.1
_POLLS = 100  # at a time: each moves one message on
_BUSY_NAP_SECONDS = 0.01  # while somebody is: an entrance more often would cost them turns
_LEAVE_SECONDS = 5.0

_over = threading.Event()
_poller: threading.Thread | None = None


def start_poller(mpi: Any) -> None:
    """Start the thread, if none runs and MPI takes calls of several threads at once.

    Where it takes one at a time, the program's own calls would have to know of ours.
    """
    global _poller
    if _poller is not None or mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        return
    thread = threading.Thread(target=_poll, args=(mpi,), name="allreduce mpi", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads
        logger.warning(
            "no background thread for MPI can be started (%s); the other "
            "ranks may wait for this one until it makes its next call",
            error,
        )
        return
    _poller = thread
    atexit.register(_end_poller)
    # A program may finalise MPI, and no other thread may be in MPI then. MPI deletes the attributes
    # of COMM_SELF first.
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=lambda *_: _end_poller()), None)


def _poll(mpi: Any) -> None:
    world, tag = mpi.COMM_WORLD, mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
    seen, nap, following = _rounds, _BUSY_NAP_SECONDS, _NAP_SECONDS
    while not _over.wait(nap):
        if _rounds != seen:
            seen, nap, following = _rounds, _BUSY_NAP_SECONDS, _NAP_SECONDS
            continue
        with entered:
            # For no message there is, so that MPI goes on with all that it holds. On COMM_SELF
            # MPICH only looks into a queue.
            for _ in range(_POLLS):
                if _over.is_set():
                    return
                world.Iprobe(mpi.ANY_SOURCE, tag)
        nap, following = following, min(2 * following, _LONGEST_NAP_SECONDS)


def _end_poller() -> None:
    """End the thread before MPI ends, and before the interpreter does."""
    _over.set()
    if _poller is not None:
        _poller.join(_LEAVE_SECONDS)


def _after_fork() -> None:
    global _poller
    _poller = None


os.register_at_fork(after_in_child=_after_fork)
