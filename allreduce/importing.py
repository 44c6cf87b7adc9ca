"""Import dependencies without interruption by Ctrl-C, and without garbage collection."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROCESS = os.getpid()  # that imported this library; a forked child has another
_paused = False  # whether a block has disabled the collector


class _Later:
    """A Ctrl-C handler that defers the signal to the previous handler."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before, self.came = before, False

    def __call__(self, *_: object) -> None:
        self.came = True


@contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for the block: libraries read them once."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def importing() -> Iterator[None]:
    """Defer Ctrl-C and garbage collection until the imports in the block are done.

    An interrupted import fails with errors of its own (NumPy's). And imports create many permanent
    objects: collecting garbage meanwhile took 25 of 330 ms of CPU time per rank that joins through
    MPI (32 ranks on two cores).

    Raises:
        ImportError: Something is missing. In a clone that is not installed, it names the remedy.
    """
    try:
        with _uninterrupted(), _uncollected():  # a second Ctrl-C must not leave the collector off
            yield
    except ImportError as error:
        clone = _clone_that_is_not_installed()
        if clone is None:
            raise
        raise ImportError(
            f"{error}: Python imports allreduce from {clone}, a clone that is not installed for "
            f"{sys.executable}; run `make .venv/.installed` there and use .venv/bin/python, or "
            "leave that folder to use an installed allreduce",
            name=error.name,
        ) from None


def _clone_that_is_not_installed() -> Path | None:
    """Return the clone that this package is imported from, if pip has not installed it there.

    A clone comes first on `sys.path` for programs that are started in its folder. It lacks
    `allreduce._native` and `allreduce.strategies`, which only the import hook of pip's editable
    installation finds, and maybe the library's dependencies.
    """
    from importlib import metadata  # takes 13 ms

    clone = Path(__file__).parent.parent
    if not (clone / "pyproject.toml").exists():
        return None
    try:
        metadata.distribution("allreduce")
        found = [find_spec(f"allreduce.{name}") for name in ("_native", "strategies")]
    except metadata.PackageNotFoundError:
        return clone
    return None if all(found) else clone


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until after the block; only the main thread handles it."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    later = _Later(handler)
    try:
        with suppress(ValueError):  # not in the main thread
            # Not with the thread's signal mask: BLAS's threads would receive the signal instead.
            signal.signal(signal.SIGINT, later)
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is later:  # else an imported module has set its own
            signal.signal(signal.SIGINT, handler)
        if later.came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector, if it is enabled."""
    global _paused
    if not gc.isenabled():
        yield
        return
    try:
        _paused = True
        gc.disable()
        yield
    finally:
        _settle()
        gc.enable()
        _paused = False


def _settle() -> None:
    """Move new objects to the oldest generation, as skipped collections would have done."""
    if not gc.get_freeze_count():  # else the program has frozen objects itself
        gc.freeze()
        gc.unfreeze()  # into the oldest generation


def _renew() -> None:
    """In a forked child: end a block that another thread of the parent was in."""
    global _paused
    found = handler = signal.getsignal(signal.SIGINT)
    while isinstance(handler, _Later):
        handler = handler.before
    if handler is not found:
        signal.signal(signal.SIGINT, handler)
    if _paused:
        gc.enable()
        _paused = False


os.register_at_fork(after_in_child=_renew)
