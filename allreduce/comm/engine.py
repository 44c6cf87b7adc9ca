"""What goes on of all started calls of this process while a thread waits.

Members may wait for calls of several communicators in any order, a different one on each: whoever
waits for one does this member's share of all of them. Calls over tcp go on by themselves, and those
in shared memory in any wait for one of these. All others are gone on with here, between slices of
whatever a thread waits for.

A member that makes a communicator waits for the others in the store and in sockets. These may first
have to complete a call that needs this member's share of it: the attendant's thread does it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

from allreduce import _native
from allreduce.comm import attendant, living

SLICE_SECONDS = 0.001  # of a wait while other calls need its thread
IDLE_SECONDS = 0.02  # while none does, but another thread may start one

_TURN_SECONDS = 0.05  # one after the other: the attendant goes on with others, too

# Each does what can be done of the calls of one kind of transport, without blocking, and says
# whether some are under way. They are added where such transports are imported.
drivers: list[Callable[[], bool]] = []


class _Here(threading.local):
    inside = False  # what drives calls looks at others, which must not be driven from there


_here = _Here()


def go_on(shared: bool = True) -> float:
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
        return attendant.go_on() or any(busy)
    finally:
        _here.inside = False


class _Meeting:
    """What the attendant goes on with until it is no more busy."""

    busy = True

    def attend(self) -> None:
        """Go on as a wait does, while calls are under way."""
        end = time.monotonic() + _TURN_SECONDS
        while self.busy and go_on() == SLICE_SECONDS and time.monotonic() < end:
            time.sleep(SLICE_SECONDS)


@contextlib.contextmanager
def going_on() -> Iterator[None]:
    """Have all calls of this process go on while this thread waits for something else."""
    meeting = _Meeting()
    try:
        if living.some():  # a process that joins has no calls yet
            attendant.attend(meeting)
        yield
    finally:
        meeting.busy = False
