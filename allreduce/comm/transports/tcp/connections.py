"""Make and accept the connections of a tcp communicator."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

from allreduce.cluster.store import ranks_text
from allreduce.comm.transports import handshake
from allreduce.comm.transports.handshake import STRANGER_SECONDS, Challenge, HandshakeError
from allreduce.comm.transports.tcp import interface
from allreduce.comm.transports.tcp.mesh import Mesh, Process
from allreduce.errors import JoinError, TimeoutError
from allreduce.events import logger

_WAKE_SECONDS = 0.02
_HELLO = struct.Struct("!5I")
HELLO_BYTES = _HELLO.size


class Hello(NamedTuple):
    """The first message on a connection: which one it is."""

    rank: int
    caller: int  # a member of the communicator
    callee: int
    channel: int  # 0 for control frames, 1 for probes, others for data
    channels: int

    def pack(self) -> bytes:
        return _HELLO.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> Hello:
        """Invert `pack`."""
        return cls(*_HELLO.unpack(packed))


class Dialer:
    """Connects to one member after the other in a background thread."""

    def __init__(self, mesh: Mesh, deadline: float) -> None:
        self._mesh, self._deadline = mesh, deadline
        self.failure: BaseException | None = None
        self._sockets: dict[tuple[int, int, int], socket.socket] = {}  # not connected yet
        self._ended = False
        self._thread = threading.Thread(target=self._call_all, name="tcp-meeting", daemon=True)

    def start(self) -> None:
        """Start to connect; sockets are made first, as strangers may use up descriptors later.

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
                f"[tcp] {mesh.world.called()} cannot connect to the others: {error}; "
                f"{interface.remedy(error)}"
            ) from error
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all are connected or one has failed; return whether that is so."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self) -> None:
        """Stop connecting; no connection is added to the mesh after this.

        Interrupts a connection that waits for an answer.
        """
        self._ended = True
        while self._thread.is_alive():
            for sock in list(self._sockets.values()):
                with contextlib.suppress(OSError):  # not connecting yet: try again
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
            handshake.call(sock, self._mesh.credentials, hello.pack())
        except (HandshakeError, OSError) as error:
            self._check_lives()
            raise JoinError(f"[tcp] {world.called()} could not join {place}: {error}") from error

    def _check_lives(self) -> None:
        """Raise PeerLostError if the connection failed because a process died."""
        if not self._ended:
            self._mesh.world.check_lives()


_MAX_CALLERS = 256  # unauthenticated at a time; others wait in the backlog
_POLL_SECONDS = 0.05
_HEAR_SECONDS = 0.25  # between checks whether another process has failed


@dataclass
class _Caller:
    """A connection that is not authenticated yet."""

    sock: socket.socket
    address: str
    challenge: Challenge
    until: float
    message: bytes = b""


class Acceptor:
    """Accepts and authenticates connections concurrently, until all members have connected.

    Args:
        dialer: This process's own connections, made at the same time.
    """

    def __init__(self, mesh: Mesh, listener: socket.socket, dialer: Dialer) -> None:
        self._mesh = mesh
        self._listener = listener
        self._dialer = dialer
        self._missing = mesh.expected(caller=False)
        self._callers: dict[int, _Caller] = {}
        self._selector = selectors.DefaultSelector()
        self._hear_at = time.monotonic() + _HEAR_SECONDS

    def run(self, deadline: float) -> None:
        """Return when all have connected, and all own connections are made or one has failed."""
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while self._missing and self._dialer.failure is None:
                if time.monotonic() >= deadline:
                    raise self._late()
                for ready, _ in self._selector.select(_POLL_SECONDS):
                    caller = self._callers.get(ready.fd)
                    if ready.fileobj is self._listener:
                        self._accept()
                    elif (
                        caller is not None and caller.sock is ready.fileobj
                    ):  # not dropped meanwhile
                        self._read(caller)
                self._drop_slow()
                self._hear()
            while not self._dialer.wait(_POLL_SECONDS):
                self._hear()
        finally:
            for caller in list(self._callers.values()):
                self._forget(caller).close()
            self._selector.close()

    def _hear(self) -> None:
        """Raise the error of another process that could not connect."""
        if time.monotonic() < self._hear_at:
            return
        self._hear_at = time.monotonic() + _HEAR_SECONDS
        world = self._mesh.world
        with contextlib.suppress(TimeoutError):
            text = world.store.get(f"{self._mesh.credentials.name}/failed", 0.0).decode()
            raise JoinError(f"[tcp] {world.called()}: not joined: {text}")

    def _late(self) -> TimeoutError:
        owners = self._mesh.owners
        ranks = ranks_text(sorted({owners[other] for _, other, _ in self._missing}))
        return TimeoutError(
            f"[tcp] {self._mesh.world.called()}: no connection came in time from {ranks}"
        )

    def _accept(self) -> None:
        if len(self._callers) >= _MAX_CALLERS:
            self._drop(self._least(), "too many connections are not authenticated")
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in interface.NO_FILES:
                raise
            self._drop_one(error)
            return  # the listener is still ready
        sock.setblocking(False)
        challenge = Challenge(self._mesh.credentials, HELLO_BYTES)
        until = time.monotonic() + STRANGER_SECONDS
        self._callers[sock.fileno()] = _Caller(sock, f"{address[0]}:{address[1]}", challenge, until)
        self._selector.register(sock, selectors.EVENT_READ)

    def _drop_one(self, error: OSError) -> None:
        """Drop an unauthenticated connection in favor of a new one."""
        if not self._callers:
            raise JoinError(
                f"[tcp] {self._mesh.world.called()} cannot accept connections: {error}; "
                f"{interface.remedy(error)}"
            ) from error
        self._drop(self._least(), f"no descriptor is left for new connections ({error})")

    def _least(self) -> _Caller:
        """Return the oldest connection with the least progress in its handshake."""
        return min(self._callers.values(), key=lambda caller: caller.challenge.begun)

    def _read(self, caller: _Caller) -> None:
        try:
            part = caller.sock.recv(caller.challenge.expects - len(caller.message))
            if not part:
                raise HandshakeError("it closed the connection")
            caller.message += part
            if len(caller.message) < caller.challenge.expects:
                return
            reply, claim = caller.challenge.answer(caller.message)
            caller.message = b""
            hello = None if claim is None else Hello.unpack(claim)
            if hello is not None:
                self._check(hello)
            caller.sock.sendall(reply)  # less than any socket's buffer
        except BlockingIOError:
            return
        except (HandshakeError, OSError) as error:
            self._drop(caller, str(error))
            return
        if hello is not None:
            sock = self._forget(caller)
            self._mesh.sockets[hello.callee, hello.caller, hello.channel] = sock
            self._missing.discard((hello.callee, hello.caller, hello.channel))

    def _check(self, hello: Hello) -> None:
        owners = self._mesh.owners
        if (hello.callee, hello.caller, hello.channel) not in self._missing:
            raise HandshakeError(f"member {hello.caller} is connected already, or not expected")
        if owners[hello.caller] != hello.rank or hello.channels != self._mesh.channels:
            raise HandshakeError(f"it is rank {hello.rank} of another world")

    def _drop_slow(self) -> None:
        now = time.monotonic()
        for caller in [one for one in self._callers.values() if now >= one.until]:
            self._drop(caller, f"it did not authenticate within {STRANGER_SECONDS:g} s")

    def _drop(self, caller: _Caller, why: str) -> None:
        logger.warning("[tcp] dropped a connection from %s: %s", caller.address, why)
        self._forget(caller).close()

    def _forget(self, caller: _Caller) -> socket.socket:
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]
        return caller.sock
