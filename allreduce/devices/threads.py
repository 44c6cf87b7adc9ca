"""Set the number of BLAS threads: this process's cores, divided by the replicas on its host.

The first of these decides: `ar.config.threading.set_intra_op_parallelism_threads`; the variables
in `BLAS_VARIABLES`, in that order; max(1, cores in the affinity mask ÷ replicas on this host).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import threadpoolctl

from allreduce.devices import options
from allreduce.devices.integers import integer
from allreduce.events import logger

# Variables that BLAS libraries read. If a user or a batch system has set one, it decides.
BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


def affinity_cores() -> int:
    """Count the cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def blas_threads(replicas_on_host: int, environ: Mapping[str, str] | None = None) -> int:
    """Return how many BLAS threads one replica's work gets.

    Args:
        replicas_on_host: How many replicas share this host, in this and in other processes.
    """
    replicas_on_host = integer("a host's number of replicas", replicas_on_host, 1)
    chosen = options.current().intra_op_threads
    if chosen is not None:
        return chosen
    requested = _requested_threads(os.environ if environ is None else environ)
    return max(1, affinity_cores() // replicas_on_host) if requested is None else requested


def limit_blas_threads(count: int) -> None:
    """Let the BLAS libraries loaded now use at most `count` threads, from now on.

    It stays so until the next call; calling it again with the same number changes nothing.
    """
    count = integer("BLAS's number of threads", count, 1)
    # Outside a `with` block the limits stay when the returned object is dropped.
    threadpoolctl.threadpool_limits(limits=count, user_api="blas")


def _requested_threads(environ: Mapping[str, str]) -> int | None:
    for variable in BLAS_VARIABLES:
        text = environ.get(variable, "").strip()
        # OpenMP takes one number per nesting level: "4,2". The outermost is meant here.
        first = text.split(",")[0].strip()
        if first.isascii() and first.isdigit() and int(first) > 0:
            return int(first)
        if text:
            logger.warning("%s=%r is not a number of threads from 1; ignored", variable, text)
    return None
