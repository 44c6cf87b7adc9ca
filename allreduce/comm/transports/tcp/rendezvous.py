"""Connect each pair of members of a tcp communicator.

Every process listens on a free port of the chosen interface and publishes its address in the
world's store. The member with the higher index connects. Every connection begins with a handshake;
a connection that fails it is dropped and logged.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import time

from allreduce import _native, settings
from allreduce.cluster import World
from allreduce.cluster.host import limits
from allreduce.comm.transports.handshake import Credentials
from allreduce.comm.transports.tcp import interface
from allreduce.comm.transports.tcp.connections import Acceptor, Dialer
from allreduce.comm.transports.tcp.mesh import Mesh, Process
from allreduce.errors import AllreduceError, JoinError, PeerLostError, UsageError

_BACKLOG = 1024
_ENGINE_FILES = 2
_FIRST_DATA = _native.TCP_FIRST_DATA  # channels before it: control frames and probes


def connect(world: World, name: str, local_members: int, timeout: float) -> Mesh:
    """Connect all members; a collective call of the processes.

    Raises:
        UsageError: There is no interface, or ranks set different numbers of connections.
        JoinError: A member cannot be reached, or does not belong to this job.
        PeerLostError: A process died meanwhile.
        TimeoutError: Members did not connect in time.
    """
    deadline = time.monotonic() + timeout
    key = f"{world.generation}/tcp/{name}"
    each = local_members * (_FIRST_DATA + settings.load().tcp_connections)
    short = limits.shortage(each * (world.size * local_members - 1) + _ENGINE_FILES)
    listener, trouble = None, ""
    try:
        listener = None if short else _listen(world)
    except UsageError as error:
        trouble = str(error)
    with listener or contextlib.nullcontext():
        processes = _introduce(world, key, listener, (short, trouble), local_members, timeout)
        assert listener is not None, "a rank without a listener has raised"
        mesh = Mesh(world, Credentials(world.job, key, world.secret), processes)
        try:
            _connect_all(mesh, listener, deadline)
        except BaseException as error:
            interrupt = f"it was interrupted by {type(error).__name__}"
            mesh.give_up(str(error) if isinstance(error, Exception) else interrupt)
            if isinstance(error, AllreduceError | OSError) and not isinstance(error, PeerLostError):
                world.store.set(f"{key}/failed", str(error).encode())
            raise
    return mesh


def _listen(world: World) -> socket.socket:
    host = interface.address(world)
    if not world.secret and not ipaddress.ip_address(host).is_loopback:
        raise UsageError(
            f"[tcp] {world.called()}: the members meet on {host}, which is not loopback, and the "
            "job has no secret: anybody on the network could join; set ALLREDUCE_SECRET to the "
            "same random text on all ranks"
        )
    listener = interface.stream(host)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"[tcp] {world.called()}: cannot listen on {host}: {error}; {interface.remedy(error)}"
        ) from error
    return listener


def _introduce(
    world: World,
    key: str,
    listener: socket.socket | None,
    troubles: tuple[str, str],
    local_members: int,
    timeout: float,
) -> tuple[Process, ...]:
    """Exchange the processes' addresses; if one cannot listen, all raise its error.

    Args:
        troubles: The errors of too few descriptors and of listening; empty without one.
    """
    host, port = listener.getsockname()[:2] if listener is not None else ("", 0)
    channels = _FIRST_DATA + settings.load().tcp_connections
    mine = [os.getpid(), local_members, host, port, channels, *troubles]
    answers = world.exchange(key, json.dumps(mine).encode(), timeout)
    all_facts = [json.loads(answer) for answer in answers]
    for rank, (*_, short, trouble) in enumerate(all_facts):
        if short:
            raise JoinError(f"[tcp] {world.called()}: not joined: {world.called(rank)}: {short}")
        if trouble:
            own = rank == world.rank
            raise UsageError(trouble if own else f"[tcp] {world.called()}: not joined: {trouble}")
    processes = tuple(Process(rank, *facts[:5]) for rank, facts in enumerate(all_facts))
    first = processes[0].channels
    for process in processes:
        if process.channels != first:
            raise UsageError(
                f"[tcp] {world.called()}: ALLREDUCE_TCP_CONNECTIONS is {first - _FIRST_DATA} on "
                f"rank 0 but {process.channels - _FIRST_DATA} on {world.called(process.rank)}; "
                "set the same everywhere"
            )
    return processes


def _connect_all(mesh: Mesh, listener: socket.socket, deadline: float) -> None:
    """Connect and accept concurrently, so that no order of members can deadlock."""
    dialer = Dialer(mesh, deadline)
    try:
        dialer.start()
        Acceptor(mesh, listener, dialer).run(deadline)
    finally:
        dialer.end()
    if dialer.failure is not None:
        raise dialer.failure
