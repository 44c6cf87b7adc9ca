"""Locks that are waited for only so long, and let go of whatever a signal's handler raises."""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(lock: threading.RLock, seconds: float | None, do: Callable[[], object]) -> bool:
    """Call something with a lock held, as `with lock` would; returns False if it was not to be had.

    A handler may raise as soon as `acquire` has returned, for which a `try` after it comes too
    late: the lock would be held for ever.

    Args:
        lock: The lock.
        seconds: How long to wait for it; without it, as long as it takes.
        do: What to call.
    """
    if lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks it
        do()
        return True
    held: bool | None = None
    try:
        held = lock.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX))
        if held:
            do()
    finally:
        if held or (held is None and lock._is_owned()):  # type: ignore[attr-defined]
            lock.release()
    return held


def owned(lock: threading.RLock) -> bool:
    """Say whether this thread holds the lock."""
    mine: bool = lock._is_owned()  # type: ignore[attr-defined]
    return mine


def taken(lock: threading.RLock) -> bool:
    """Say whether a thread holds the lock, this one or another."""
    return owned(lock) or not within(lock, 0.0, lambda: None)
