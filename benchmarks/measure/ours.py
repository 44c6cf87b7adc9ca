"""Our side: a collective on `comm.empty` memory, and on ordinary NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from allreduce.comm import Communicator
from allreduce.comm.calls.call import DTYPES
from measure.cases import Array, Case
from measure.contest import EMPTY, ORDINARY, Contestant


def carries(dtype: str) -> bool:
    """Say whether collectives take arrays of a type."""
    return dtype in DTYPES


def contestants(comm: Communicator, case: Case) -> list[Contestant]:
    """Make our contestants; a collective call. Only shared memory can be symmetric."""

    def symmetric(count: int) -> Array:
        return comm.empty((count,), case.numpy_dtype)

    def ordinary(count: int) -> Array:
        return np.empty(count, case.numpy_dtype)

    made = [_contestant(ORDINARY, comm, case, ordinary)]
    if comm.transport == "shared":
        made.insert(0, _contestant(EMPTY, comm, case, symmetric))
    return made


def _contestant(
    name: str, comm: Communicator, case: Case, allocate: Callable[[int], Array]
) -> Contestant:
    x = allocate(case.count)
    out = x if case.in_place else allocate(case.out_count)
    act = getattr(comm, case.collective)
    return Contestant(
        name,
        case,
        refill=lambda source: np.copyto(x, source),
        barrier=comm.barrier,
        call=lambda: act(x, out=out),
        result=lambda: out,
    )
