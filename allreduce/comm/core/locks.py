"""Lock helpers with timeouts that are safe against exceptions of signal handlers."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_locked(lock: threading.RLock, seconds: float | None, do: Callable[[], object]) -> bool:
    """Call a function with a lock held, as `with lock` would; return False on timeout.

    A signal handler may raise right after `acquire` returns, before a following `try` begins. The
    lock would then stay held for ever.

    Args:
        seconds: Timeout for acquiring it; None for none.
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
    """Return whether this thread holds the lock."""
    mine: bool = lock._is_owned()  # type: ignore[attr-defined]
    return mine


def is_locked(lock: threading.RLock) -> bool:
    """Return whether any thread holds the lock."""
    return owned(lock) or not run_locked(lock, 0.0, lambda: None)
