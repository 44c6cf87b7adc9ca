"""The table of planners, which compute what a call would do without making it.

A planner is a function of a call, its context and the choices in force; each has its own file, and
a row here. The hierarchical transport has none: it combines the plans of these
(hierarchical/plan.py). `Communicator.plan` is for callers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from allreduce.comm.calls.call import Call
from allreduce.comm.calls.plan import Placed, Plan, Topology
from allreduce.comm.selection.choosing import Choices
from allreduce.errors import unknown_name

# Transport -> module and function of its planner; imported when first used.
REGISTRY: dict[str, tuple[str, str]] = {
    "shared": ("allreduce.comm.transports.shared.plan", "plan_shared"),
    "tcp": ("allreduce.comm.transports.tcp.plan", "plan_tcp"),
    "mpi": ("allreduce.comm.transports.mpi.plan", "plan_mpi"),
}

Planner = Callable[[Call, Topology, Choices, Placed], Plan]
_EVERYWHERE = Placed()


def plan(call: Call, topology: Topology, choices: Choices, placed: Placed = _EVERYWHERE) -> Plan:
    """Plan a call; pure: nothing is sent, and no array is touched.

    Raises:
        UsageError: There is no planner for the transport.
    """
    if topology.transport not in REGISTRY:
        raise unknown_name("transport", topology.transport, REGISTRY)
    module, function = REGISTRY[topology.transport]
    planner = cast(Planner, getattr(importlib.import_module(module), function))
    return planner(call, topology, choices, placed)
