"""How this library imports what it needs: in one piece, and at less cost."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Have Ctrl-C, and the search for garbage, wait for the imports in the block.

    What Ctrl-C breaks off fails with errors of its own (NumPy's). And imports make many objects,
    which stay: to search them for garbage again and again took 25 ms of the processor in each rank
    that joins through MPI, which took 330 in all where 32 ranks share two cores.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with _uninterrupted():
            yield
    finally:
        if collects:
            _settle()
            gc.enable()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Have Ctrl-C be handled behind the block; only the main thread handles it at all."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    # Not by the thread's signal mask: those of BLAS would take the signal in its place.
    signal.signal(signal.SIGINT, lambda number, _: late.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if late:
            signal.raise_signal(signal.SIGINT)


def _settle() -> None:
    """Have what was made count as old, as if it had survived the searches that were left out."""
    if not gc.get_freeze_count():  # else the program has frozen objects, which are to stay so
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
