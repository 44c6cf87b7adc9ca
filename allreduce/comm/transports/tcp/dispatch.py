"""How a process calls the members that expect it while a tcp communicator is made."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from allreduce.comm.transports import handshake
from allreduce.comm.transports.handshake import HandshakeError
from allreduce.comm.transports.tcp import interface
from allreduce.errors import JoinError

if TYPE_CHECKING:
    from allreduce.comm.transports.tcp.meeting import Mesh, Process

_WAKE_SECONDS = 0.02
_HELLO = struct.Struct("!5I")
HELLO_BYTES = _HELLO.size


class Hello(NamedTuple):
    """Who calls whom, and for which of their connections."""

    rank: int
    caller: int  # members of the communicator
    callee: int
    channel: int  # 0 for words, 1 for probes, others for data
    channels: int

    def pack(self) -> bytes:
        return _HELLO.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> Hello:
        """Read what `pack` has written."""
        return cls(*_HELLO.unpack(packed))


class Calling:
    """Calls one member after the other, in a thread of its own, until all are called or `end`.

    Args:
        mesh: Takes the connections.
        deadline: `time.monotonic()` seconds.
    """

    def __init__(self, mesh: Mesh, deadline: float) -> None:
        self._mesh, self._deadline = mesh, deadline
        self.failure: BaseException | None = None
        self._sockets: dict[tuple[int, int, int], socket.socket] = {}  # that wait for their call
        self._ended = False
        self._thread = threading.Thread(target=self._call_all, name="tcp-meeting", daemon=True)

    def start(self) -> None:
        """Begin to call, with sockets that strangers cannot use up the descriptors for any more.

        Raises:
            JoinError: There are too few descriptors.
        """
        mesh = self._mesh
        try:
            for mine, other, channel in sorted(mesh.expected(caller=True)):
                host = mesh.processes[mesh.owners[other]].host
                self._sockets[mine, other, channel] = interface.stream(host)
        except OSError as error:
            raise JoinError(
                f"[tcp] {mesh.world.called()} cannot call the others: {error}; "
                f"{interface.remedy(error)}"
            ) from error
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all are called, or a call has failed; returns whether that is so."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self) -> None:
        """Call nobody any more; no connection is added to the mesh after this.

        A call that waits for an answer, which it may as long as the meeting lasts, is cut short.
        """
        self._ended = True
        while self._thread.is_alive():
            for sock in list(self._sockets.values()):
                with contextlib.suppress(OSError):  # not even connecting yet: once more
                    sock.shutdown(socket.SHUT_RDWR)
            self.wait(_WAKE_SECONDS)
        for sock in self._sockets.values():
            sock.close()

    def _call_all(self) -> None:
        try:
            for mine, other, channel in list(self._sockets):
                if self._ended:
                    return
                self._call(mine, other, channel)
        except BaseException as error:
            self.failure = error

    def _call(self, mine: int, other: int, channel: int) -> None:
        mesh = self._mesh
        process = mesh.processes[mesh.owners[other]]
        hello = Hello(mesh.world.rank, mine, other, channel, mesh.channels)
        self._reach(self._sockets[mine, other, channel], process, hello)
        mesh.sockets[mine, other, channel] = self._sockets.pop((mine, other, channel))

    def _reach(self, sock: socket.socket, process: Process, hello: Hello) -> None:
        world = self._mesh.world
        place = f"{world.called(process.rank)} at {process.host}:{process.port}"
        try:
            sock.settimeout(max(0.001, self._deadline - time.monotonic()))
            sock.connect((process.host, process.port))
        except OSError as error:
            self._check_lives()
            raise JoinError(
                f"[tcp] {world.called()} cannot reach {place}: {error}; {interface.remedy(error)}"
            ) from error
        try:
            sock.settimeout(max(0.001, self._deadline - time.monotonic()))
            handshake.call(sock, self._mesh.meeting, hello.pack())
        except (HandshakeError, OSError) as error:
            self._check_lives()
            raise JoinError(f"[tcp] {world.called()} could not join {place}: {error}") from error

    def _check_lives(self) -> None:
        """Raise PeerLostError if a call failed because somebody died, and not because of `end`."""
        if not self._ended:
            self._mesh.world.check_lives()
