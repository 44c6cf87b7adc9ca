"""The thread that enters MPI from time to time while nobody waits there.

What is complete here may still have to leave: MPI takes messages into queues of its own, and moves
them on while the process is in MPI only. MPICH 5.0 does so with its acknowledgement of a large
message when the other side's cells are full: members waited, for as long as this one computed or
read a file, for a call that was complete here.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from allreduce.comm.transports.mpi import mpi_progress
from allreduce.events import logger

# Between looks, once nobody is in MPI any more: at first as long as a message may wait unnoticed,
# then as rarely as costs a computing program nothing.
_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.001, 0.1
_LOOKS = 100  # at a time: each moves one message on
_BUSY_NAP_SECONDS = 0.01  # while somebody is: an entrance more often would cost them turns
_LEAVE_SECONDS = 5.0

_over = threading.Event()
_thread: threading.Thread | None = None


def begin(mpi: Any) -> None:
    """Start the thread, if none runs and MPI takes calls of several threads at once.

    Where it takes one at a time, the program's own calls would have to know of ours.
    """
    global _thread
    if _thread is not None or mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        return
    thread = threading.Thread(target=_run, args=(mpi,), name="allreduce mpi", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads
        logger.warning(
            "no thread can be started that enters MPI while nobody waits there (%s); the other "
            "ranks may wait for this one until it makes its next call",
            error,
        )
        return
    _thread = thread
    atexit.register(_leave)
    # A program may finalise MPI by itself, and must be alone in it then: what is attached to
    # COMM_SELF is deleted first.
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=lambda *_: _leave()), None)


def _run(mpi: Any) -> None:
    world, tag = mpi.COMM_WORLD, mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
    seen, nap, following = mpi_progress.turns(), _BUSY_NAP_SECONDS, _NAP_SECONDS
    while not _over.wait(nap):
        if mpi_progress.turns() != seen:
            seen, nap, following = mpi_progress.turns(), _BUSY_NAP_SECONDS, _NAP_SECONDS
            continue
        with mpi_progress.entered:
            # For no message there is, so that MPI goes on with all that it holds. On COMM_SELF
            # MPICH only looks into a queue.
            for _ in range(_LOOKS):
                if _over.is_set():
                    return
                world.Iprobe(mpi.ANY_SOURCE, tag)
        nap, following = following, min(2 * following, _LONGEST_NAP_SECONDS)


def _leave() -> None:
    """End the thread before MPI ends, and before the interpreter does."""
    _over.set()
    if _thread is not None:
        _thread.join(_LEAVE_SECONDS)


def _after_fork() -> None:
    global _thread
    _thread = None


os.register_at_fork(after_in_child=_after_fork)
