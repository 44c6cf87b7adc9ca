"""Plans of the mpi transport: MPI keeps its own."""

from __future__ import annotations

import numpy as np

from allreduce.comm.calls.call import Call
from allreduce.comm.calls.plan import Plan, Topology, in_units
from allreduce.comm.transports.mpi.converted import parts, wire_of


def plan_mpi(call: Call, topology: Topology) -> Plan:
    """Say that MPI chooses the algorithm, and which types are converted."""
    agree = "reduce the call's signature over all members, to find out whether they agree"
    steps = ("MPI decides how; its own variables (MPIR_CVAR_…, OMPI_MCA_coll_…) say what",)
    if call.collective in ("send", "recv"):
        return Plan(str(call), "mpi", "mpi", steps)
    wire = wire_of(call)
    found = [] if wire is None else list(parts(call, wire, topology.size))
    if not found:
        return Plan(str(call), "mpi", "mpi", (agree, *steps))
    sizes = [part.count * np.dtype(wire).itemsize for part in found]
    chunk = max(sizes) if len(found) > 1 else 0
    number = f"in {len(found)} pieces, one after the other" if chunk else "in one piece"
    convert = (
        f"convert {call.dtype} to {wire}, which MPI reduces, {number}: {in_units(sum(sizes))} in "
        f"all, with {in_units(max(sizes))} of memory; and the results back"
    )
    shown = (agree, convert, *steps)
    return Plan(str(call), "mpi", "mpi", shown, chunk=chunk, staging=max(sizes))
