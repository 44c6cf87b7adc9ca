"""How the members of a tcp communicator come to be connected, each with each.

Every process listens on a free port of the chosen interface and tells the others its address
through the world's store. The member of the higher index calls. A handshake opens every connection;
whoever fails it is dropped and logged, and accepting goes on.
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
from allreduce.cluster.host import fd_limits
from allreduce.comm.transports.handshake import Credentials
from allreduce.comm.transports.tcp import interface
from allreduce.comm.transports.tcp.connections import Acceptor, Dialer
from allreduce.comm.transports.tcp.mesh import Mesh, Process
from allreduce.errors import AllreduceError, JoinError, PeerLostError, UsageError

_BACKLOG = 1024
_ENGINE_FILES = 2
_FIRST_DATA = _native.TCP_FIRST_DATA  # before it come the connections for words and for probes


def connect(world: World, name: str, local_members: int, timeout: float) -> Mesh:
    """Meet the other processes and connect all members; a collective call of the processes.

    Raises:
        UsageError: There is no interface, or ranks want different numbers of connections.
        JoinError: A member cannot be reached, or proved not to be of this job.
        PeerLostError: A process died meanwhile.
        TimeoutError: Members did not come.
    """
    deadline = time.monotonic() + timeout
    key = f"{world.generation}/tcp/{name}"
    each = local_members * (_FIRST_DATA + settings.load().tcp_connections)
    short = fd_limits.shortage(each * (world.size * local_members - 1) + _ENGINE_FILES)
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
    """Tell all processes where this one listens, or have all of them raise why it cannot.

    Args:
        troubles: That there are too few descriptors here, and why it does not listen; or nothing.
    """
    host, port = listener.getsockname()[:2] if listener is not None else ("", 0)
    channels = _FIRST_DATA + settings.load().tcp_connections
    mine = [os.getpid(), local_members, host, port, channels, *troubles]
    told = [json.loads(text) for text in world.exchange(key, json.dumps(mine).encode(), timeout)]
    for rank, (*_, short, trouble) in enumerate(told):
        if short:
            raise JoinError(f"[tcp] {world.called()}: not joined: {world.called(rank)}: {short}")
        if trouble:
            own = rank == world.rank
            raise UsageError(trouble if own else f"[tcp] {world.called()}: not joined: {trouble}")
    processes = tuple(Process(rank, *facts[:5]) for rank, facts in enumerate(told))
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
    """Call and be called at once, so that no order of members can lock up."""
    calling = Dialer(mesh, deadline)
    try:
        calling.start()
        Acceptor(mesh, listener, calling).run(deadline)
    finally:
        calling.end()
    if calling.failure is not None:
        raise calling.failure
