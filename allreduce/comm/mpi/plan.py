"""Plans of the mpi transport: MPI keeps its own."""

from __future__ import annotations

from allreduce.comm.call import Call
from allreduce.comm.choice.choosing import Choices
from allreduce.comm.plan import Placed, Plan, Topology


def plan_mpi(
    call: Call,
    topology: Topology,  # noqa: ARG001  # MPI's own affair
    choices: Choices,
    placed: Placed,  # noqa: ARG001
) -> Plan:
    """Say that MPI decides, by its own table and the fabric it finds."""
    choice = choices.choose(call.collective, None)
    agree = "reduce the call's signature over all members, to find out whether they agree"
    steps = ("MPI decides how; its own variables (MPIR_CVAR_…, OMPI_MCA_coll_…) say what",)
    message = call.collective in ("send", "recv")
    return Plan(str(call), "mpi", choice.algorithm, steps if message else (agree, *steps))
