"""The sockets between the processes of one communicator.

The death of a process is an end of file for every other. Descriptors of files are passed along.
"""

from __future__ import annotations

import builtins
import errno
import os
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

from allreduce import _native
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.selection.choosing import Choices

_STATUS = struct.Struct("!Ii")  # number of the file; an errno value, or 0 with the file
_PROCESS = struct.Struct("!IIIQ16s")
PROCESS_BYTES = _PROCESS.size


class Token(NamedTuple):
    """Random bytes in a process's memory; a process that finds them there can read that memory."""

    address: int
    value: bytes


class Process(NamedTuple):
    """One process of the communicator."""

    rank: int
    pid: int
    local_members: int
    token: Token = Token(0, bytes(16))

    def pack(self) -> bytes:
        return _PROCESS.pack(self.rank, self.pid, self.local_members, *self.token)

    @classmethod
    def unpack(cls, packed: bytes) -> Process:
        """Invert `pack`."""
        rank, pid, local_members, *token = _PROCESS.unpack(packed)
        return cls(rank, pid, local_members, Token(*token))


@dataclass
class Links:
    """One process's sockets, by the rank at the other end."""

    rank: int
    processes: tuple[Process, ...] = ()
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    # The union of all members' cores; a launcher may bind each rank to its own.
    cores: int = field(default_factory=lambda: len(allowed_cores()))
    _passed: int = 0  # files so far, including late ones

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()

    def pass_file(self, fd: int | None, error: int, deadline: float) -> tuple[int | None, int]:
        """Pass rank 0's file, or its error, to all processes; a collective call of them.

        Args:
            fd: Rank 0's file; None on the others, or on failure.
            error: Rank 0's errno value, or 0.
            deadline: `time.monotonic()` seconds.

        Returns:
            The file (the caller's to close), and rank 0's errno value.

        Raises:
            OSError: A process died meanwhile, or it took too long.
        """
        self._passed += 1
        if self.rank == 0:
            self._send_file(fd, error, deadline)
            return fd, error
        while True:
            number, error, file = self._receive_file(deadline)
            if number == self._passed:
                return file, error
            if file is not None:  # an earlier file, which this process gave up
                os.close(file)

    def _send_file(self, fd: int | None, error: int, deadline: float) -> None:
        failure = None
        for sock in self.sockets.values():
            try:
                set_deadline(sock, deadline)
                message = _STATUS.pack(self._passed, error)
                socket.send_fds(sock, [message], [] if fd is None else [fd])
            except OSError as lost:  # continue: the others still wait
                failure = lost
        if failure is not None:
            raise failure

    def _receive_file(self, deadline: float) -> tuple[int, int, int | None]:
        sock = self.sockets[0]
        set_deadline(sock, deadline)
        try:
            message, fd = receive_with_file(sock, _STATUS.size)
        except builtins.TimeoutError as late:
            raise OSError(errno.ETIMEDOUT, "rank 0 shared no memory in time") from late
        if not message:
            raise ConnectionResetError(errno.ECONNRESET, "rank 0 died while it shared memory")
        number, error = _STATUS.unpack(message)
        if error == 0 and fd is None:  # the receiver had no free descriptor
            error = errno.EMFILE
        return number, error, fd


def receive_with_file(sock: socket.socket, size: int) -> tuple[bytes, int | None]:
    """Receive a message and the file that was sent with it, if any.

    Returns:
        The message and the file's descriptor (the caller's to close); empty and None if the sender
        died in the middle of the message.
    """
    message, fds, _, _ = socket.recv_fds(sock, size, 1, socket.MSG_CMSG_CLOEXEC)
    fd = fds[0] if fds else None
    if len(message) == size:
        return message, fd
    if fd is not None:
        os.close(fd)
    return b"", None


def set_deadline(sock: socket.socket, deadline: float) -> None:
    """Set a socket's timeout to end at `deadline`, in `time.monotonic()` seconds."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))


def allowed_cores() -> list[int]:
    """Return the cores that this process or this thread may run on."""
    return sorted(os.sched_getaffinity(os.getpid()) | os.sched_getaffinity(0))


class LocalGroup:
    """The state that this process's members share: mapped regions and sockets."""

    def __init__(
        self,
        group: _native.Group,
        links: Links,
        members: tuple[MemberInfo, ...],
        local: int,
        choices: Choices,
    ) -> None:
        self.group = group
        self.choices = choices
        self.links = links
        self.members = members
        self.local_members = local
        self.first = sum(process.local_members for process in links.processes[: links.rank])
        self._open = local
        weakref.finalize(self, links.close).atexit = False
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Unregister a member; the last one closes the sockets."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self.group.drop_peers()
                self.links.close()
