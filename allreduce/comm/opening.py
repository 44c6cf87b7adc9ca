"""How this process's members of a transport become communicators."""

from __future__ import annotations

from collections.abc import Sequence

from allreduce.cluster import World
from allreduce.comm import living
from allreduce.comm.base import Transport
from allreduce.comm.communicator import Communicator


def communicators(world: World, transports: Sequence[Transport], name: str) -> list[Communicator]:
    """Make the communicators, whose transports leave in good order at the program's end.

    Args:
        world: Whose processes have met.
        transports: This process's members.
        name: The communicator's.
    """
    for transport in transports:
        living.add(transport)
    return [_communicator(world, transport, name) for transport in transports]


def _communicator(world: World, transport: Transport, name: str) -> Communicator:
    size = len(transport.members)
    per_process = size == world.size
    return Communicator(
        transport,
        name=name,
        label=str(transport.members[transport.index]),
        rank=transport.index,
        size=size,
        local_rank=world.local_rank if per_process else transport.index,
        local_size=world.local_size if per_process else size,
    )
