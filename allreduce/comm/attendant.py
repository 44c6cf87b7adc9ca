"""The thread that goes on with calls in stages where nobody waits for them.

A member that started one and computes, or waits for something else, would otherwise keep the others
waiting for its next stage; of two such calls, waited for in another order, for ever.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

from allreduce import events

# Between looks: at first far less than anybody notices of plain data; where a member computes for
# long, as rarely as its wait for the others is asked about elsewhere.
_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.001, 0.01
_LEAVE_SECONDS = 5.0


class Locked(Protocol):
    """What has a lock."""

    lock: threading.RLock


class Attended(Protocol):
    """Calls that go on by themselves."""

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""

    def attend(self) -> None:
        """Do what can be done without waiting."""


_lock = threading.Lock()
_known: weakref.WeakSet[Locked] = weakref.WeakSet()
_attended: set[Attended] = set()
_left: set[Attended] = set()  # what no thread of ours may go on with: who waits does
_thread: threading.Thread | None = None
_nap = _NAP_SECONDS


def know(one: Locked) -> None:
    """Have its lock free in a child made by fork, whatever other threads did meanwhile."""
    _known.add(one)


def attend(one: Attended) -> None:
    """Go on with these until nothing is left to do."""
    global _thread, _nap
    with _lock:
        _attended.add(one)
        _nap = _NAP_SECONDS
        if _thread is None:
            thread = threading.Thread(target=_run, name="allreduce stages", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: who waits goes on by itself
                events.logger.warning(
                    "no thread can be started that goes on with calls nobody waits for (%s); the "
                    "other ranks may wait for this one until it makes its next call",
                    error,
                )
                return
            _thread = thread


def leave_to_waits(one: Attended) -> None:
    """Go on with these where threads of the program wait: none of ours may."""
    with _lock:
        _left.add(one)


def go_on() -> bool:
    """Do what can be done of what is left to waits; says whether any of it is under way."""
    if not _left:
        return False
    with _lock:
        _left.difference_update([one for one in _left if not one.busy])
        under_way = list(_left)
    for one in under_way:
        one.attend()
    return bool(under_way)


def _run() -> None:
    global _nap
    while waiting := _waiting():
        for one in waiting:
            try:
                one.attend()
            except Exception as error:  # who waits for the call hears of it, too
                events.logger.warning("a call that nobody waits for yet has failed: %s", error)
        time.sleep(_nap)
        _nap = min(_nap * 1.1, _LONGEST_NAP_SECONDS)


def _waiting() -> list[Attended]:
    """List who is to be attended; without any the thread ends, and makes room for another."""
    global _thread
    with _lock:
        _attended.difference_update([one for one in _attended if not one.busy])
        if not _attended:
            _thread = None
        return list(_attended)


def leave() -> None:
    """End the thread before the interpreter ends: it may be in native code."""
    with _lock:
        _attended.clear()
        _left.clear()
        thread = _thread
    if thread is not None:
        thread.join(_LEAVE_SECONDS)


def _after_fork() -> None:
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _attended.clear()
    _left.clear()
    for one in list(_known):
        one.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
