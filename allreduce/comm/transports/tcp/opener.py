"""Open the tcp transport."""

from __future__ import annotations

import os
from typing import TypeVar

from allreduce.cluster import World
from allreduce.comm.selection.choosing import choices_for
from allreduce.comm.transports.handshake import Credentials
from allreduce.comm.transports.tcp.failures import TcpMemberInfo
from allreduce.comm.transports.tcp.mesh import Mesh, Process
from allreduce.comm.transports.tcp.rendezvous import connect
from allreduce.comm.transports.tcp.transport import TcpTransport
from allreduce.errors import JoinError

T = TypeVar("T", bound=TcpTransport)


def open_tcp(
    world: World,
    local_members: int,
    *,
    name: str,
    timeout: float,
    kind: type[T] = TcpTransport,  # type: ignore[assignment]
) -> list[T]:
    """Open this process's members of a transport over all processes of the world.

    Members of one process are connected over loopback, like any others.

    Args:
        kind: The class of the transports.

    Raises:
        UsageError: There is no suitable interface.
        JoinError: A member cannot be reached or does not belong to this job, or the system has
            too few descriptors or threads.
        PeerLostError: A process died meanwhile.
        TimeoutError: Members did not connect in time.
    """
    if world.size * local_members == 1:
        alone = Process(world.rank, os.getpid(), 1, "", 0, 0)
        mesh = Mesh(world, Credentials(world.job, name, world.secret), (alone,))
    else:
        mesh = connect(world, name, local_members, timeout)
    replicated = any(process.local_members > 1 for process in mesh.processes)
    machine = world.members[world.rank].machine
    members = tuple(
        TcpMemberInfo(
            *(index, world.members[rank].world_rank, mesh.processes[rank].pid, replicated),
            world.members[rank].host,
            near=world.members[rank].machine == machine,
        )
        for index, rank in enumerate(mesh.owners)
    )
    choices = choices_for("tcp", len(members))
    made: list[T] = []
    try:
        for index in mesh.local:
            made.append(kind(index, _sockets(mesh, index), members, name, timeout, choices))
    except OSError as error:
        for transport in made:
            transport.abort("another member of this process could not join")
        refused = members[mesh.local[len(made)]]
        raise JoinError(
            f"[tcp] {refused}: the system refuses a thread or descriptor for its connections: "
            f"{error}; raise this process's limits: ulimit -n for descriptors, -u and -v for "
            "threads"
        ) from error
    finally:
        mesh.close()  # sockets that no transport owns
    return made


def _sockets(mesh: Mesh, index: int) -> list[list[int]]:
    """Remove a member's sockets from the mesh, by peer and channel."""
    sockets: list[list[int]] = [[] for _ in mesh.owners]
    for other in range(len(sockets)):
        if other != index:
            sockets[other] = [
                mesh.sockets.pop((index, other, channel)).detach()
                for channel in range(mesh.channels)
            ]
    return sockets
