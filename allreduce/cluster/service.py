"""The group leader as a gRPC server on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from allreduce.cluster import leader_pb2 as pb
from allreduce.cluster import proof
from allreduce.cluster.address import check_secret
from allreduce.cluster.base import Member
from allreduce.cluster.group import Group
from allreduce.cluster.rpc import PROTOCOL, SERVER_OPTIONS, grpc, leader_pb2_grpc
from allreduce.errors import JoinError

HANDSHAKE_SECONDS = 10.0
BEAT_SECONDS = 1.0
START_SECONDS = 10.0


class Leader:
    """Hosts the groups of one job until `close()`.

    Args:
        address: `host:port`; port 0 takes a free one. See `address` afterwards.
        size: How many ranks the job has.
        secret: What members have to know.
        generation: The only generation to serve, for a leader that ends with its host's world; the
            launcher's serves all.
        silence: Seconds without a heartbeat after which a connected member counts as lost. A
            process that dies is noticed at once, by its connection; this is for severed networks
            and stopped processes.

    Raises:
        JoinError: Nothing can listen at `address`.
        UsageError: `address` is not loopback and `secret` is empty.
    """

    def __init__(
        self,
        address: str,
        size: int,
        secret: bytes,
        silence: float = 300.0,
        generation: int | None = None,
    ) -> None:
        check_secret(address, secret)
        self.size, self.secret, self.silence = size, secret, silence
        self.generation = generation
        self.address = address
        self.groups: dict[int, Group] = {}
        self.closing = False
        self._changed = threading.Condition()
        self._attending = 0
        self._started: threading.Event = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="allreduce-leader", daemon=True)
        self._thread.start()
        if not self._started.wait(START_SECONDS) or self._failure is not None:
            raise JoinError(
                f"[cluster] no group leader can listen at {address}: "
                f"{self._failure or 'the server did not start'}"
            )

    @property
    def first_lost(self) -> int | None:
        """The rank that was lost first, in any generation."""
        found = [group.first_lost for group in self.groups.values()]
        return next((rank for rank in found if rank is not None), None)

    def close(self, drain: float = 0.0) -> None:
        """Stop, after waiting up to `drain` seconds for members that are still connected."""
        with self._changed:
            self.closing = True
            self._changed.wait_for(lambda: self._attending == 0, drain)
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # handed to the constructor, which raises it
            self._failure = error
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        leader_pb2_grpc.add_LeaderServicer_to_server(_Servicer(self), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port(self.address)
        if port == 0:
            raise OSError("the address is in use or not of this machine")
        self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await server.start()
        self._started.set()
        await self._stop.wait()
        await server.stop(grace=0)

    def count(self, change: int) -> None:
        """Note that a member came or went."""
        with self._changed:
            self._attending += change
            self._changed.notify_all()


class _Servicer(leader_pb2_grpc.LeaderServicer):
    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    async def Attend(self, _: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        session = _Session(self._leader, context)
        try:
            if await asyncio.wait_for(session.shake_hands(), HANDSHAKE_SECONDS):
                await session.attend()
        except (TimeoutError, asyncio.CancelledError):
            return  # too slow, or the connection or the server ended: the call is over


class _Session:
    """One member's connection."""

    def __init__(self, leader: Leader, context: Any) -> None:
        self._leader, self._context = leader, context
        self._outbox: asyncio.Queue[pb.ToMember] = asyncio.Queue()
        self._heard = time.monotonic()

    async def shake_hands(self) -> bool:
        """Prove and be proved to; then admit or refuse."""
        leader = self._leader
        first = await self._read()
        if first is None or first.WhichOneof("content") != "hello":
            return False
        hello = first.hello
        if hello.protocol != PROTOCOL:
            return await self._refuse(
                f"protocol {hello.protocol} came and the leader speaks {PROTOCOL}: "
                "install the same version of allreduce everywhere"
            )
        identity = hello.identity
        nonces = (hello.nonce, proof.nonce())
        claim = (identity.rank, hello.size, hello.generation, identity.pid)
        shown = proof.prove(leader.secret, "leader", nonces, claim)
        await self._context.write(pb.ToMember(challenge=pb.Challenge(nonce=nonces[1], proof=shown)))
        answer = await self._read()
        if answer is None or answer.WhichOneof("content") != "proof":
            return False
        expected = proof.prove(leader.secret, "member", nonces, claim)
        if not proof.proves(answer.proof.proof, expected):
            return await self._refuse("the secret is wrong")
        return await self._admit(hello)

    async def _admit(self, hello: pb.Hello) -> bool:
        if self._leader.closing or self._leader.generation not in (None, hello.generation):
            return await self._refuse(
                f"this leader does not serve generation {hello.generation} of the job", again=True
            )
        identity = hello.identity
        self._member = Member(identity.rank, identity.host, identity.pid)
        group = self._leader.groups.setdefault(hello.generation, Group(self._leader.size))
        why = group.refusal(self._member, hello.size)
        if why is not None:
            return await self._refuse(why)
        self._group = group
        self._outbox.put_nowait(pb.ToMember(welcome=pb.Welcome(job=group.job)))
        group.enter(self._member, self._outbox.put_nowait)
        return True

    async def attend(self) -> None:
        """Serve the member until it leaves, dies or falls silent."""
        rank, self._heard = self._member.rank, time.monotonic()
        self._leader.count(+1)
        tasks = [asyncio.create_task(job()) for job in (self._send, self._watch)]
        reason, lost = "its connection to the group leader broke: it died, or failed", True
        receiving = asyncio.create_task(self._receive())
        try:
            await asyncio.wait([receiving, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if receiving.done() and not receiving.cancelled() and receiving.exception() is None:
                reason, lost = ("it left", False) if receiving.result() else (reason, lost)
            elif tasks[1].done():
                reason = f"its heartbeats stopped for {self._leader.silence:g} s"
        finally:
            self._group.leave(rank, reason, lost=lost)
            for task in (receiving, *tasks):
                task.cancel()
            self._leader.count(-1)

    async def _receive(self) -> bool:
        """Handle requests to the end; returns whether the member said goodbye."""
        loop, rank = asyncio.get_running_loop(), self._member.rank
        while (message := await self._read()) is not None:
            self._heard = time.monotonic()
            if message.WhichOneof("content") == "leave":
                return True
            if self._group.handle(rank, message):
                loop.call_later(max(0.0, message.timeout), self._group.expire, rank, message)
        return False

    async def _send(self) -> None:
        while True:
            await self._context.write(await self._outbox.get())

    async def _watch(self) -> None:
        """Return when the member has been silent too long while this process was awake."""
        awake = time.monotonic()
        while time.monotonic() - self._heard < self._leader.silence:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            if now - awake > 5 * BEAT_SECONDS:  # we were stopped or starved: the silence was ours
                self._heard = now
            awake = now

    async def _read(self) -> pb.FromMember | None:
        read: Callable[[], Awaitable[Any]] = self._context.read
        message = await read()
        return message if isinstance(message, pb.FromMember) else None  # else grpc.aio.EOF

    async def _refuse(self, why: str, *, again: bool = False) -> bool:
        await self._context.write(pb.ToMember(refusal=pb.Refusal(why=why, again=again)))
        return False
