"""How this library imports what it needs: in one piece, and at less cost."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Have Ctrl-C, and the search for garbage, wait for the imports in the block.

    What Ctrl-C breaks off fails with errors of its own (NumPy's). And imports make many objects and
    next to no garbage: to look for it took 20 ms of the processor in each rank that joins through
    MPI, where 32 ranks take 330 ms each on two cores.
    """
    unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
