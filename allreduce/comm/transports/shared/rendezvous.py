"""Connect the processes of one communicator on one host.

Rank 0 listens on an abstract Unix socket whose name it publishes in the world's store. It
authenticates each caller and sends each pair of processes a socket pair.

Processes also test whether they can read each other's memory (process_vm_readv). The kernel allows
it where tracing is allowed: for the same user, unless a security module (Yama's ptrace_scope), a
container's system call filter or the process itself forbids it. As process numbers are valid in one
namespace only, each process looks for a token in the others' memory.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import secrets
import socket
import struct
import time

import numpy as np

from allreduce import _native, settings
from allreduce.cluster import World
from allreduce.cluster.host import limits
from allreduce.comm.transports import handshake
from allreduce.comm.transports.handshake import STRANGER_SECONDS, Credentials, HandshakeError
from allreduce.comm.transports.shared.links import (
    PROCESS_BYTES,
    Links,
    Process,
    Token,
    allowed_cores,
    receive_with_file,
    set_deadline,
)
from allreduce.errors import JoinError, TimeoutError, UnsupportedError
from allreduce.events import logger

_POLL_SECONDS = 0.25  # between checks whether an absent rank has died
_PAIR = struct.Struct("!I")


def connect(world: World, name: str, local_members: int, timeout: float) -> Links:
    """Connect to the other processes of the world; a collective call.

    Raises:
        UnsupportedError: Ranks do not share a host.
        PeerLostError: A process died meanwhile.
        JoinError: A process failed authentication, or has no descriptors left.
        TimeoutError: Ranks did not arrive.
        ConnectionError: A connection broke.
    """
    deadline = time.monotonic() + timeout
    key = f"{world.generation}/comm/{name}"
    credentials = Credentials(world.job, key, world.secret)
    me = Process(world.rank, os.getpid(), local_members, new_token())
    try:
        if short := limits.shortage(world.size):
            if world.rank == 0:
                world.store.set(f"{key}/address", b"")
            _compare(world, key, "", deadline, short)
        if world.rank == 0:
            return _host(world, key, credentials, me, deadline)
        return _visit(world, key, credentials, me, deadline)
    except builtins.TimeoutError as error:
        if isinstance(error, TimeoutError):  # of the store; it names the missing ranks
            raise
        raise late(world, timeout) from error


def late(world: World, timeout: float) -> TimeoutError:
    """Build the error for a timeout of a socket."""
    return TimeoutError(
        f"[shared] {world.called()}: the ranks did not all meet within {timeout:g} s"
    )


def _host(world: World, key: str, credentials: Credentials, me: Process, deadline: float) -> Links:
    address = f"allreduce-{world.job}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    links = Links(0)
    try:
        listener.bind(f"\0{address}")
        listener.listen(world.size + 16)
        world.store.set(f"{key}/address", address.encode())
        links.cores = _compare(world, key, "", deadline)
        callers = _accept_all(world, listener, links, credentials, deadline)
        links.sockets = dict(sorted(links.sockets.items()))
        links.processes = (me, *(callers[rank] for rank in links.sockets))
        for sock in links.sockets.values():
            set_deadline(sock, deadline)
        _introduce(links)
    except BaseException:
        links.close()
        raise
    finally:
        listener.close()
    return links


def _accept_all(
    world: World, listener: socket.socket, links: Links, credentials: Credentials, deadline: float
) -> dict[int, Process]:
    """Accept the others' sockets into `links`, and return their processes by rank.

    On failure the sockets close, which the processes that have arrived notice.
    """
    callers: dict[int, Process] = {}
    while len(callers) < world.size - 1:
        sock = _accept(world, listener, deadline)
        sock.settimeout(STRANGER_SECONDS)
        try:
            caller = Process.unpack(handshake.answer(sock, credentials, PROCESS_BYTES))
            if caller.rank in callers or not 0 < caller.rank < world.size:
                raise HandshakeError(f"rank {caller.rank} is connected already, or not expected")
        except (HandshakeError, OSError) as error:
            logger.warning("[shared] dropped a connection: %s", error)
            sock.close()
        else:
            links.sockets[caller.rank], callers[caller.rank] = sock, caller
    return callers


def _accept(world: World, listener: socket.socket, deadline: float) -> socket.socket:
    while True:
        set_deadline(listener, min(deadline, time.monotonic() + _POLL_SECONDS))
        try:
            return listener.accept()[0]
        except builtins.TimeoutError:
            if time.monotonic() >= deadline:
                raise
        world.check_lives(0.0)


def _introduce(links: Links) -> None:
    """Send every process the table of processes, and each pair a socket pair."""
    table = b"".join(process.pack() for process in links.processes)
    for sock in links.sockets.values():
        sock.sendall(table)
    ranks = list(links.sockets)
    for i, low in enumerate(ranks):
        for high in ranks[i + 1 :]:
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with ends[0], ends[1]:
                socket.send_fds(links.sockets[low], [_PAIR.pack(high)], [ends[0].fileno()])
                socket.send_fds(links.sockets[high], [_PAIR.pack(low)], [ends[1].fileno()])


def _visit(world: World, key: str, credentials: Credentials, me: Process, deadline: float) -> Links:
    address = world.store.get(f"{key}/address", max(0.001, deadline - time.monotonic())).decode()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    links = Links(world.rank, sockets={0: sock})
    try:
        try:
            set_deadline(sock, deadline)
            sock.connect(f"\0{address}")
            failure = ""
        except ConnectionRefusedError as error:
            failure = str(error)
        links.cores = _compare(world, key, failure, deadline)
        set_deadline(sock, deadline)
        handshake.call(sock, credentials, me.pack())
        rows = (handshake.receive(sock, PROCESS_BYTES) for _ in range(world.size))
        found = [Process.unpack(row) for row in rows]
        links.processes = (
            *found[: me.rank],
            me,
            *found[me.rank + 1 :],
        )  # keeps the own token alive
        for _ in range(world.size - 2):
            _receive_pair(links, sock)
    except HandshakeError as error:
        links.close()
        world.check_lives()
        raise JoinError(
            f"[shared] {world.called()} could not join rank 0's communicator: {error}"
        ) from error
    except BaseException:
        links.close()
        raise
    return links


def _receive_pair(links: Links, sock: socket.socket) -> None:
    message, fd = receive_with_file(sock, _PAIR.size)
    if not message:
        raise HandshakeError("rank 0 ended while it introduced the processes to each other")
    (rank,) = _PAIR.unpack(message)
    if fd is None:
        raise HandshakeError(
            f"this process had no free file descriptor for its socket to rank {rank}; raise the "
            "limit, by ulimit -n"
        )
    links.sockets[rank] = socket.socket(fileno=fd)


def _compare(world: World, key: str, failure: str, deadline: float, short: str = "") -> int:
    """Check on all ranks that all can share memory with rank 0; return the number of cores."""
    remaining = max(0.001, deadline - time.monotonic())
    mine = [failure, allowed_cores(), short, _native.LAYOUT]
    answers = world.exchange(f"{key}/reached", json.dumps(mine).encode(), remaining)
    reports = [json.loads(answer) for answer in answers]
    for rank, (_, _, text, _) in enumerate(reports):
        if text:
            raise JoinError(f"[shared] {world.called()}: not joined: {world.called(rank)}: {text}")
    far = [rank for rank, (text, *_) in enumerate(reports) if text]
    if far:
        hosts = {rank: world.members[rank].host for rank in (0, far[0])}
        raise UnsupportedError(
            f"[shared] {world.called()}: {world.called(far[0])} on {hosts[far[0]]} cannot reach "
            f"{world.called(0)} on {hosts[0]} through a Unix socket ({reports[far[0]][0]}): they "
            "do not share a host and its network namespace; use the transport hierarchical or tcp "
            "between hosts, and set ALLREDUCE_HOST to a different name on each if these were "
            "taken for one"
        )
    layouts = [layout for *_, layout in reports]
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise JoinError(
                f"[shared] {world.called()}: {world.called(0)} and {world.called(rank)} run "
                f"different builds of allreduce, whose shared memory has the layouts "
                f"{layouts[0]:x} and {layout:x}; install the same build for every rank"
            )
    return len({core for _, cores, *_ in reports for core in cores})


def new_token() -> Token:
    """Return bytes for others to find in this process's memory; keep them alive."""
    value = secrets.token_bytes(16)
    return Token(np.frombuffer(value, np.uint8).ctypes.data, value)


def pull_refusal(links: Links) -> int:
    """Return the errno value of reading the other processes' memory; 0 if that works."""
    if not settings.load().shared_pull:
        return errno.ECANCELED
    for process in links.processes:
        if process.rank == links.rank:
            continue
        address, value = process.token
        try:
            found = _native.read_process(process.pid, address, len(value))
        except OSError as error:
            return error.errno or errno.EPERM
        if found != value:  # another namespace: the number is another process here
            return errno.ESRCH
    return 0


def pull_refusal_text(refused: int) -> str:
    """Explain why a process does not read the others' memory."""
    if refused == errno.ECANCELED:
        return "has that switched off, by ALLREDUCE_SHARED_PULL=off"
    return f"cannot read the others' memory: {os.strerror(refused)}"
