"""What goes on of all started calls of this process while a thread waits.

Members may wait for calls of several communicators in any order, a different one on each: whoever
waits for one does this member's share of all of them. Calls over tcp go on by themselves, and those
in shared memory in any wait for one of these. All others are gone on with here, between slices of
whatever a thread waits for.

A member that makes a communicator waits for the others in the store and in sockets. These may first
have to complete a call that needs this member's share of it: a thread does it meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator

from allreduce import _native
from allreduce.cluster.process import exit_hooks
from allreduce.comm.core import lifecycle
from allreduce.events import logger

SLICE_SECONDS = 0.001  # of a wait while other calls need its thread
IDLE_SECONDS = 0.02  # while none does, but another thread may start one

_END_SECONDS = 5.0

_helpers: dict[threading.Thread, threading.Event] = {}  # threads that drive calls, until an event

# Each does what can be done of the calls of one kind of transport, without blocking, and says
# whether some are under way. They are added where such transports are imported.
drivers: list[Callable[[], bool]] = []


class _Here(threading.local):
    inside = False  # what drives calls looks at others, which must not be driven from there


_here = _Here()


def make_progress(shared: bool = True) -> float:
    """Do what can be done of all calls now, as far as this thread may.

    Args:
        shared: Also of those in shared memory, if what the thread waits in does not do that.

    Returns:
        For how many seconds the thread may wait until it has to do so again.
    """
    if not shared and not drivers:
        return math.inf
    busy = _native.progress() if shared else False
    return SLICE_SECONDS if _drive() or busy else IDLE_SECONDS


def _drive() -> bool:
    if _here.inside:
        return True
    try:
        _here.inside = True
        busy = [driver() for driver in drivers]
        return any(busy)
    finally:
        _here.inside = False


@contextlib.contextmanager
def background_progress() -> Iterator[None]:
    """Drive all calls of this process in a thread while the caller waits for something else."""
    if not lifecycle.any_open():  # a process that joins has no calls yet
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_drive_until, args=(over,), name="allreduce", daemon=True)
    try:
        try:
            thread.start()
            _helpers[thread] = over
        except RuntimeError as error:  # no more threads
            logger.warning(
                "no thread can be started (%s): until all members of the new communicator have "
                "come, calls under way do not go on here",
                error,
            )
        yield
    finally:
        over.set()
        if _helpers.pop(thread, None) is not None:
            thread.join(_END_SECONDS)  # in native code it must not outlive the interpreter


def _drive_until(over: threading.Event) -> None:
    seconds = 0.0
    while not over.wait(seconds):
        seconds = make_progress()


def _end_helpers() -> None:
    """End the threads before the interpreter ends: one may be in native code."""
    for thread, over in list(_helpers.items()):
        over.set()
        thread.join(_END_SECONDS)


exit_hooks.before_exit(_end_helpers)
