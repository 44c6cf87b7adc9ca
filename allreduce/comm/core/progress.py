"""Make progress on all started calls of this process while a thread waits.

Members may wait for calls of several communicators in different orders. So a thread that waits for
one call drives all calls of its process. Calls over tcp have a thread of their own; a wait for a
call in shared memory drives all such calls. This module drives the others, between time slices of
the wait.

While a process makes a communicator it waits for other processes in the store and in sockets. They
may first have to complete a call that needs this process, so a background thread drives calls.
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

SLICE_SECONDS = 0.001  # slice of a wait while other calls need the thread
IDLE_SECONDS = 0.02  # slice while none does; another thread may start one

_END_SECONDS = 5.0

_helpers: dict[
    threading.Thread, threading.Event
] = {}  # background threads, and the events that end them

# One per kind of transport: makes progress on its calls without blocking, and returns whether some
# are in flight. The transports' modules register them on import.
drivers: list[Callable[[], bool]] = []


class _Here(threading.local):
    inside = False  # guards against recursion: a driver may poll calls of other kinds


_here = _Here()


def make_progress(shared: bool = True) -> float:
    """Make progress on all calls that this thread may drive.

    Args:
        shared: Include calls in shared memory, unless the caller's wait drives them.

    Returns:
        Seconds that the thread may wait until the next call of this function.
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
    """Drive all calls of this process in a background thread during the block."""
    if not lifecycle.any_open():  # no calls yet
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
                "no thread can be started (%s): calls in flight make no progress here until all "
                "members of the new communicator have come",
                error,
            )
        yield
    finally:
        over.set()
        if _helpers.pop(thread, None) is not None:
            thread.join(_END_SECONDS)  # native code must not outlive the interpreter


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
