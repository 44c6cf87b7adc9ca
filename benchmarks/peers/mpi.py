"""MPI's side, on ordinary arrays: it shares our processes, and takes turns with us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from measure.cases import Array, Case
from measure.contest import Contestant
from mpi4py import MPI


def name() -> str:
    """Return whose MPI this is."""
    return str(MPI.get_vendor()[0])


def version() -> str:
    """Return the library's own words, in one line."""
    return " ".join(MPI.Get_library_version().strip("\0 \n").split("\n")[0].split(",")[0].split())


def contestant(mpi: MPI.Comm, case: Case) -> Contestant:
    """Make MPI's contestant for a case."""
    x = np.empty(case.count, case.numpy_dtype)
    out = x if case.in_place else np.empty(case.out_count, case.numpy_dtype)
    return Contestant(
        name(),
        case,
        refill=lambda source: np.copyto(x, source),
        barrier=mpi.Barrier,
        call=_call(mpi, case.collective, x, out),
        result=lambda: out,
    )


def _call(mpi: MPI.Comm, collective: str, x: Array, out: Array) -> Callable[[], Any]:
    if collective == "all_reduce":
        return lambda: mpi.Allreduce(MPI.IN_PLACE, out)
    if collective == "broadcast":
        return lambda: mpi.Bcast(out, root=0)
    act: Callable[[Array, Array], None] = {
        "reduce_scatter": mpi.Reduce_scatter_block,
        "all_gather": mpi.Allgather,
        "all_to_all": mpi.Alltoall,
    }[collective]
    return lambda: act(x, out)
