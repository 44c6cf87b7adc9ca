"""How this library imports what it needs: in one piece, and at less cost."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

PROCESS = os.getpid()  # in which this library was imported; a forked child is another
_rests = False  # whether a block has the collector off


class _Later:
    """A handler of Ctrl-C that keeps it for the one before."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before, self.came = before, False

    def __call__(self, *_: object) -> None:
        self.came = True


@contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Have environment variables that are not set, for the block: libraries read them once."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def importing() -> Iterator[None]:
    """Have Ctrl-C, and the search for garbage, wait for the imports in the block.

    What Ctrl-C breaks off fails with errors of its own (NumPy's). And imports make many objects,
    which stay: to search them for garbage again and again took 25 ms of the processor in each rank
    that joins through MPI, which took 330 in all where 32 ranks share two cores.
    """
    with _uninterrupted(), _unsearched():  # a second Ctrl-C must not leave the collector off
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Have Ctrl-C be handled behind the block; only the main thread handles it at all."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    later = _Later(handler)
    try:
        with suppress(ValueError):  # not in the main thread
            # Not by the thread's signal mask: those of BLAS would take the signal in its place.
            signal.signal(signal.SIGINT, later)
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is later:  # else what was imported has set its own
            signal.signal(signal.SIGINT, handler)
        if later.came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _unsearched() -> Iterator[None]:
    """Have the collector rest, if it is on."""
    global _rests
    if not gc.isenabled():
        yield
        return
    try:
        _rests = True
        gc.disable()
        yield
    finally:
        _settle()
        gc.enable()
        _rests = False


def _settle() -> None:
    """Have what was made count as old, as if it had survived the searches that were left out."""
    if not gc.get_freeze_count():  # else the program has frozen objects, which are to stay so
        gc.freeze()
        gc.unfreeze()  # into the oldest generation


def _renew() -> None:
    """In a child made by fork: the block that another thread of the parent's is in never ends."""
    global _rests
    found = handler = signal.getsignal(signal.SIGINT)
    while isinstance(handler, _Later):
        handler = handler.before
    if handler is not found:
        signal.signal(signal.SIGINT, handler)
    if _rests:
        gc.enable()
        _rests = False


os.register_at_fork(after_in_child=_renew)
