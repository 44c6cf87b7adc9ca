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
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from allreduce import settings
from allreduce.cluster import World
from allreduce.comm import stored_choices, tcp_handshake, tcp_interface
from allreduce.comm.handshake import HandshakeError, Meeting
from allreduce.comm.tcp_handshake import STRANGER_SECONDS, Challenge, Hello
from allreduce.errors import JoinError, TimeoutError, UsageError
from allreduce.events import logger

_BACKLOG = 1024
_MAX_CALLERS = 256  # unproved at a time; further ones wait in the backlog
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """What one process of the communicator tells the others."""

    rank: int
    pid: int
    local_members: int
    host: str
    port: int
    channels: int


@dataclass
class Mesh:
    """The sockets of this process's members: by member, then by peer and channel."""

    world: World
    meeting: Meeting
    processes: tuple[Process, ...]
    sockets: dict[tuple[int, int, int], socket.socket] = field(default_factory=dict)

    @property
    def owners(self) -> list[int]:
        """The rank of every member."""
        return [p.rank for p in self.processes for _ in range(p.local_members)]

    @property
    def local(self) -> list[int]:
        """This process's members."""
        return [m for m, rank in enumerate(self.owners) if rank == self.world.rank]

    @property
    def channels(self) -> int:
        return self.processes[0].channels

    def expected(self, caller: bool) -> set[tuple[int, int, int]]:
        """List the (own member, peer, channel) that this process calls, or is called for."""
        members = range(len(self.owners))
        return {
            (mine, other, channel)
            for mine in self.local
            for other in members
            for channel in range(self.channels)
            if (other < mine if caller else other > mine)
        }

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()


def connect(world: World, name: str, local_members: int, timeout: float) -> Mesh:
    """Meet the other processes and connect all members; a collective call of the processes.

    Raises:
        UsageError: There is no interface, or ranks want different numbers of connections.
        JoinError: A member cannot be reached, or proved not to be of this job.
        TimeoutError: Members did not come.
    """
    deadline = time.monotonic() + timeout
    key = f"{world.generation}/tcp/{name}"
    listener, trouble = None, ""
    try:
        listener = _listen(world)
    except UsageError as error:
        trouble = str(error)
    with listener or contextlib.nullcontext():
        processes = _introduce(world, key, listener, trouble, local_members, timeout)
        assert listener is not None, "a rank without a listener has raised"
        mesh = Mesh(world, Meeting(world.job, key, world.secret), processes)
        try:
            _connect_all(mesh, listener, deadline)
        except BaseException:
            mesh.close()
            raise
    return mesh


def _listen(world: World) -> socket.socket:
    host = tcp_interface.address(world)
    parsed = ipaddress.ip_address(host)
    if not world.secret and not parsed.is_loopback:
        raise UsageError(
            f"[tcp] rank {world.rank}: the members meet on {host}, which is not loopback, and the "
            "job has no secret: anybody on the network could join; set ALLREDUCE_SECRET to the "
            "same random text on all ranks"
        )
    family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"[tcp] rank {world.rank}: cannot listen on {host}: {error}; set "
            "ALLREDUCE_TCP_INTERFACE to an interface of this host that is up"
        ) from error
    return listener


def _introduce(
    world: World,
    key: str,
    listener: socket.socket | None,
    trouble: str,
    local_members: int,
    timeout: float,
) -> tuple[Process, ...]:
    """Tell all processes where this one listens, or have all of them raise why it cannot."""
    host, port = listener.getsockname()[:2] if listener is not None else ("", 0)
    channels = settings.load().tcp_connections + 1
    mine = [os.getpid(), local_members, host, port, channels, trouble, stored_choices.offer()]
    told = [json.loads(text) for text in world.exchange(key, json.dumps(mine).encode(), timeout)]
    for rank, (*_, theirs, _) in enumerate(told):
        if theirs:
            own = rank == world.rank
            raise UsageError(theirs if own else f"[tcp] rank {world.rank}: not joined: {theirs}")
    stored_choices.agree(f"[tcp] rank {world.rank}", world, [facts[-1] for facts in told])
    processes = tuple(Process(rank, *facts[:5]) for rank, facts in enumerate(told))
    first = processes[0].channels
    for process in processes:
        if process.channels != first:
            raise UsageError(
                f"[tcp] rank {world.rank}: ALLREDUCE_TCP_CONNECTIONS is {first - 1} on rank 0 but "
                f"{process.channels - 1} on rank {process.rank}; set the same everywhere"
            )
    return processes


def _connect_all(mesh: Mesh, listener: socket.socket, deadline: float) -> None:
    """Call and be called at once, so that no order of members can lock up."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def call_all() -> None:
        try:
            for mine, other, channel in sorted(mesh.expected(caller=True)):
                sock = _call(mesh, mine, other, channel, deadline)
                mesh.sockets[mine, other, channel] = sock
                if stop.is_set():
                    return
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call_all, name="tcp-meeting", daemon=True)
    thread.start()
    try:
        _Reception(mesh, listener, failures).run(deadline)
    except BaseException:
        stop.set()  # its sockets are closed by the caller: none may come later
        raise
    finally:
        thread.join()
    if failures:
        raise failures[0]


def _call(mesh: Mesh, mine: int, other: int, channel: int, deadline: float) -> socket.socket:
    process = mesh.processes[mesh.owners[other]]
    world = mesh.world
    hello = Hello(*(world.generation, world.size, world.rank, mine, other, channel, mesh.channels))
    remaining = deadline - time.monotonic()
    try:
        sock = socket.create_connection((process.host, process.port), max(0.001, remaining))
    except OSError as error:
        raise JoinError(
            f"[tcp] rank {world.rank} cannot reach rank {process.rank} at "
            f"{process.host}:{process.port}: {error}; if another interface connects them, name it "
            "in ALLREDUCE_TCP_INTERFACE"
        ) from error
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        tcp_handshake.call(sock, mesh.meeting, hello)
    except (HandshakeError, OSError) as error:
        sock.close()
        raise JoinError(
            f"[tcp] rank {world.rank} could not join rank {process.rank} at "
            f"{process.host}:{process.port}: {error}"
        ) from error
    return sock


@dataclass
class _Caller:
    """A connection that has not proved itself."""

    sock: socket.socket
    address: str
    challenge: Challenge
    until: float
    message: bytes = b""


class _Reception:
    """Takes callers in, all at once, until all members that have to call are there."""

    def __init__(self, mesh: Mesh, listener: socket.socket, failures: list[BaseException]) -> None:
        self._mesh = mesh
        self._listener = listener
        self._failures = failures
        self._missing = mesh.expected(caller=False)
        self._callers: dict[int, _Caller] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, deadline: float) -> None:
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while self._missing and not self._failures:
                if time.monotonic() >= deadline:
                    raise self._late()
                for ready, _ in self._selector.select(_POLL_SECONDS):
                    if ready.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(self._callers[ready.fd])
                self._drop_slow()
        finally:
            for caller in list(self._callers.values()):
                self._forget(caller).close()
            self._selector.close()

    def _late(self) -> TimeoutError:
        owners = self._mesh.owners
        ranks = sorted({owners[other] for _, other, _ in self._missing})
        return TimeoutError(
            f"[tcp] rank {self._mesh.world.rank}: nobody called in time from rank"
            f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        )

    def _accept(self) -> None:
        if len(self._callers) >= _MAX_CALLERS:
            oldest = next(iter(self._callers.values()))
            self._drop(oldest, "too many connections prove nothing")
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        world = self._mesh.world
        challenge = Challenge(self._mesh.meeting, world.generation, world.size)
        until = time.monotonic() + STRANGER_SECONDS
        self._callers[sock.fileno()] = _Caller(sock, f"{address[0]}:{address[1]}", challenge, until)
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, caller: _Caller) -> None:
        try:
            part = caller.sock.recv(caller.challenge.expects - len(caller.message))
            if not part:
                raise HandshakeError("it closed the connection")
            caller.message += part
            if len(caller.message) < caller.challenge.expects:
                return
            reply, hello = caller.challenge.answer(caller.message)
            caller.message = b""
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
