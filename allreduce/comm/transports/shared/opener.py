"""Open the shared transport: connect the processes, and map rank 0's file in all of them."""

from __future__ import annotations

import builtins
import errno
import os
import struct
import time

from allreduce import _native
from allreduce.cluster import World
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.selection.choosing import Choices, choices_for
from allreduce.comm.transports import handshake
from allreduce.comm.transports.shared import memory
from allreduce.comm.transports.shared.links import Links, LocalGroup, Process
from allreduce.comm.transports.shared.rendezvous import (
    connect,
    late,
    pull_refusal,
    pull_refusal_text,
)
from allreduce.comm.transports.shared.transport import SharedTransport
from allreduce.errors import AllreduceError, JoinError, OutOfMemoryError, UnsupportedError
from allreduce.events import logger

_REPORT = struct.Struct("!iI")  # an errno value, and the rank that got it


def open_shared(
    world: World, local_members: int, *, name: str, timeout: float
) -> list[SharedTransport]:
    """Open this process's members of a transport over all processes of the world.

    Raises:
        OutOfMemoryError: A process lacks the memory; raised on all of them.
        UnsupportedError: The system refuses to make shared memory; raised on all of them.
        PeerLostError: A process died meanwhile.
    """
    try:
        local = _meet(world, local_members, name, timeout)
    except AllreduceError:
        raise
    except builtins.TimeoutError as error:
        raise late(world, timeout) from error
    except (ConnectionError, handshake.HandshakeError) as failure:
        world.check_lives()  # names the dead process, if there is one
        raise JoinError(
            f"[shared] {world.called()}: a process ended while they made a communicator: {failure}"
        ) from failure
    return [SharedTransport(local, local.first + i, name, timeout) for i in range(local_members)]


def _meet(world: World, local_members: int, name: str, timeout: float) -> LocalGroup:
    """Connect the processes and share memory among them."""
    deadline = time.monotonic() + timeout
    if world.size == 1:
        links = Links(0, (Process(0, os.getpid(), local_members),))
    else:
        links = connect(world, name, local_members, timeout)
    try:
        return _share(world, links, deadline)
    except BaseException:
        links.close()
        raise


def _share(world: World, links: Links, deadline: float) -> LocalGroup:
    """Map rank 0's control region in all processes, or in none."""
    replicated = any(process.local_members > 1 for process in links.processes)
    members = tuple(
        MemberInfo(index, world.members[process.rank].world_rank, process.pid, replicated)
        for index, process in enumerate(
            process for process in links.processes for _ in range(process.local_members)
        )
    )
    _check_number(world, len(members))
    crowded = len(members) > links.cores
    refused, by = _agree(links, pull_refusal(links))
    if refused and links.sockets:
        logger.info(
            "[shared] %s: copies go through rings, not straight out of memory: %s %s",
            *(world.called(), world.called(by), pull_refusal_text(refused)),
        )
    choices = choices_for("shared", len(members), crowded, pulls=not refused)
    group = _allocate(world, links, len(members), choices, deadline)
    _watch(group, links)
    own = links.processes[links.rank].local_members
    return LocalGroup(group, links, members, own, choices)


def _check_number(world: World, members: int) -> None:
    if members > _native.MAX_MEMBERS:
        raise UnsupportedError(
            f"[shared] {world.called()}: a communicator of the shared transport has at most "
            f"{_native.MAX_MEMBERS} members, but these would be {members}; choose transport='tcp'"
        )


def _allocate(
    world: World, links: Links, members: int, choices: Choices, deadline: float
) -> _native.Group:
    needed = _native.Group.control_bytes(members)
    fd, error, group = None, 0, None
    try:
        if links.sockets and links.rank == 0:
            fd = memory.allocate(needed)
    except OSError as failure:
        error = failure.errno or errno.ENOMEM
    try:
        if links.sockets:
            fd, error = links.pass_file(fd, error, deadline)
        if error == 0:
            file = -1 if fd is None else fd
            group = _native.Group(file, members, links.cores, choices.native)
    except OSError as failure:
        error = failure.errno or errno.ENOMEM
    finally:
        if fd is not None:
            os.close(fd)
    error, rank = _agree(links, error)
    if error in memory.REFUSED and rank == 0:
        raise UnsupportedError(
            f"[shared] {world.called()}: no shared memory for a communicator: the system call "
            f"memfd_create is refused to {world.called(rank)} ({os.strerror(error)}), as by a "
            "container's seccomp profile; allow it, or choose ALLREDUCE_TRANSPORT=tcp"
        )
    if error or group is None:
        raise OutOfMemoryError(
            f"[shared] {world.called()}: no shared memory of {needed} bytes for a communicator of "
            f"{members} members: {world.called(rank)} got {os.strerror(error)!r}; here "
            f"{memory.available()}"
        )
    return group


def _agree(links: Links, error: int) -> tuple[int, int]:
    """Return the errno value and rank of the first process that failed, or 0, on all processes."""
    mine = _REPORT.pack(error, links.rank)
    if links.rank != 0:
        links.sockets[0].sendall(mine)
        found = _REPORT.unpack(handshake.receive(links.sockets[0], _REPORT.size))
        return int(found[0]), int(found[1])
    reports = [(error, 0)]
    for sock in links.sockets.values():
        report = _REPORT.unpack(handshake.receive(sock, _REPORT.size))
        reports.append((int(report[0]), int(report[1])))
    verdict = next((report for report in reports if report[0]), (0, 0))
    for sock in links.sockets.values():
        sock.sendall(_REPORT.pack(*verdict))
    return verdict


def _watch(group: _native.Group, links: Links) -> None:
    owners = [process.rank for process in links.processes for _ in range(process.local_members)]
    for rank, sock in links.sockets.items():
        living = [member for member, owner in enumerate(owners) if owner == rank]
        group.add_peer(sock.fileno(), links.processes[rank].pid, living)
