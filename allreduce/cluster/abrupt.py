"""`os._exit` of a rank under MPICH's and Intel MPI's launcher, which would end the job unexplained.

When a rank's line to that launcher (hydra) breaks before MPI is finalised, it kills the other ranks
of the host at once and counts them as well ended: with `os._exit(0)` the whole job seems to have
succeeded, and nobody is left to tell (MPICH, src/pm/hydra/proxy/pmip_cb.c). So whoever leaves tells
itself, and ends the job as failed.
"""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Callable
from typing import NoReturn

from allreduce.cluster import pmi

exit_now = os._exit  # whatever has been put in its place
_watched = 0  # the process whose os._exit is explained


def watch(rank: int, over: Callable[[], bool]) -> None:
    """Explain an `os._exit` of this process from now on; once is enough.

    Args:
        rank: This process's.
        over: Tells whether MPI has been finalised, after which nobody minds.
    """
    global _watched
    pid = os.getpid()
    if _watched == pid:
        return
    _watched = pid

    def leave(status: int) -> NoReturn:
        status = operator.index(status)
        if os.getpid() == pid and not over() and pmi.connected():
            text = (
                f"[allreduce] rank {rank} (process {pid}) ends by os._exit({status}) while MPI "
                "runs, and mpirun ends the other ranks with it; end programs by sys.exit\n"
            )
            with contextlib.suppress(OSError):  # there is nobody to tell
                os.write(2, text.encode())
                time.sleep(pmi.REPORT_SECONDS)
                pmi.abort(status & 0xFF or 1)
                time.sleep(pmi.KILL_SECONDS)
        exit_now(status)

    os._exit = leave
