"""How a process takes in the members that call it while a tcp communicator is made."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allreduce.comm.transports.handshake import STRANGER_SECONDS, Challenge, HandshakeError
from allreduce.comm.transports.tcp import interface
from allreduce.comm.transports.tcp.dispatch import HELLO_BYTES, Calling, Hello
from allreduce.errors import JoinError, TimeoutError
from allreduce.events import logger

if TYPE_CHECKING:
    from allreduce.comm.transports.tcp.meeting import Mesh

_MAX_CALLERS = 256  # unproved at a time; further ones wait in the backlog
_POLL_SECONDS = 0.05
_HEAR_SECONDS = 0.25  # between looks whether another process has failed


@dataclass
class _Caller:
    """A connection that has not proved itself."""

    sock: socket.socket
    address: str
    challenge: Challenge
    until: float
    message: bytes = b""


class Reception:
    """Takes callers in, all at once, until all members that have to call are there.

    Args:
        mesh: Takes the connections.
        listener: Where they call.
        calling: This process's own calls, which go on meanwhile.
    """

    def __init__(self, mesh: Mesh, listener: socket.socket, calling: Calling) -> None:
        self._mesh = mesh
        self._listener = listener
        self._calling = calling
        self._missing = mesh.expected(caller=False)
        self._callers: dict[int, _Caller] = {}
        self._selector = selectors.DefaultSelector()
        self._hear_at = time.monotonic() + _HEAR_SECONDS

    def run(self, deadline: float) -> None:
        """Return when all have called, and all calls of our own are done or one has failed."""
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while self._missing and self._calling.failure is None:
                if time.monotonic() >= deadline:
                    raise self._late()
                for ready, _ in self._selector.select(_POLL_SECONDS):
                    caller = self._callers.get(ready.fd)
                    if ready.fileobj is self._listener:
                        self._accept()
                    elif caller is not None and caller.sock is ready.fileobj:  # not dropped since
                        self._read(caller)
                self._drop_slow()
                self._hear()
            while not self._calling.wait(_POLL_SECONDS):
                self._hear()
        finally:
            for caller in list(self._callers.values()):
                self._forget(caller).close()
            self._selector.close()

    def _hear(self) -> None:
        """Raise what has kept another process from connecting: nobody will come from there."""
        if time.monotonic() < self._hear_at:
            return
        self._hear_at = time.monotonic() + _HEAR_SECONDS
        world = self._mesh.world
        with contextlib.suppress(TimeoutError):
            text = world.store.get(f"{self._mesh.meeting.name}/failed", 0.0).decode()
            raise JoinError(f"[tcp] {world.called()}: not joined: {text}")

    def _late(self) -> TimeoutError:
        owners = self._mesh.owners
        ranks = sorted({owners[other] for _, other, _ in self._missing})
        return TimeoutError(
            f"[tcp] {self._mesh.world.called()}: nobody called in time from rank"
            f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        )

    def _accept(self) -> None:
        if len(self._callers) >= _MAX_CALLERS:
            self._drop(self._least(), "too many connections prove nothing")
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in interface.NO_FILES:
                raise
            self._make_room(error)
            return  # the listener is still ready
        sock.setblocking(False)
        challenge = Challenge(self._mesh.meeting, HELLO_BYTES)
        until = time.monotonic() + STRANGER_SECONDS
        self._callers[sock.fileno()] = _Caller(sock, f"{address[0]}:{address[1]}", challenge, until)
        self._selector.register(sock, selectors.EVENT_READ)

    def _make_room(self, error: OSError) -> None:
        """Let a connection that has proved nothing go for one that calls."""
        if not self._callers:
            raise JoinError(
                f"[tcp] {self._mesh.world.called()} cannot take in who calls: {error}; "
                f"{interface.remedy(error)}"
            ) from error
        self._drop(self._least(), f"no descriptor is left for those that call ({error})")

    def _least(self) -> _Caller:
        """Return the oldest connection of those that have said least."""
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
            raise HandshakeError(f"member {hello.caller} is here already, or not expected")
        if owners[hello.caller] != hello.rank or hello.channels != self._mesh.channels:
            raise HandshakeError(f"it is rank {hello.rank} of another world")

    def _drop_slow(self) -> None:
        now = time.monotonic()
        for caller in [one for one in self._callers.values() if now >= one.until]:
            self._drop(caller, f"it proved nothing within {STRANGER_SECONDS:g} s")

    def _drop(self, caller: _Caller, why: str) -> None:
        logger.warning("[tcp] dropped a connection from %s: %s", caller.address, why)
        self._forget(caller).close()

    def _forget(self, caller: _Caller) -> socket.socket:
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]
        return caller.sock
