"""The leader's side of one member's connection: handshake, requests, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from allreduce.cluster.host import waiting
from allreduce.cluster.leader import leader_pb2 as pb
from allreduce.cluster.leader import proof
from allreduce.cluster.leader.group import Group
from allreduce.cluster.leader.rpc import BEAT_SECONDS, PROTOCOL, grpc
from allreduce.cluster.store import ranks_text
from allreduce.cluster.world import Member

HANDSHAKE_SECONDS = 3.0
GREETING_BYTES = 4096  # limit of messages before admission, so that a flood costs little memory
STRANGERS = 16  # connections accepted beyond one per rank, if enough files remain


class Host(Protocol):
    """The part of the leader that a session uses."""

    size: int
    secret: bytes
    silence: float
    generation: int | None
    closing: bool
    groups: dict[int, Group]
    ended: dict[int, Member]
    attending: int
    asked: float


class Session:
    """One member's connection."""

    def __init__(self, leader: Host, context: Any) -> None:
        self._leader, self._context = leader, context
        self._outbox: asyncio.Queue[pb.ToMember] = asyncio.Queue()
        self._heard = time.monotonic()

    async def serve(self) -> None:
        """Serve the member to its end."""
        try:
            admitted = await asyncio.wait_for(self._shake_hands(), HANDSHAKE_SECONDS)
        except (TimeoutError, grpc.aio.BaseError):  # too slow, or it left before the answer
            return
        if admitted:
            await self._attend()

    async def _shake_hands(self) -> bool:
        """Exchange proofs of the secret; then admit or refuse."""
        leader = self._leader
        first = await self._read_small("hello")
        if first is None:
            return False
        hello = first.hello
        if hello.protocol != PROTOCOL:
            return await self._refuse(
                f"protocol {hello.protocol} came and the leader speaks {PROTOCOL}: "
                "install the same version of allreduce everywhere"
            )
        if len(hello.nonce) != proof.NONCE_BYTES:
            return await self._refuse(f"a nonce of {len(hello.nonce)} bytes came")
        identity = hello.identity
        nonces = (hello.nonce, proof.nonce())
        claim = (identity.rank, hello.size, hello.generation, identity.pid)
        shown = proof.prove(leader.secret, "leader", nonces, claim)
        await self._context.write(pb.ToMember(challenge=pb.Challenge(nonce=nonces[1], proof=shown)))
        answer = await self._read_small("proof")
        if answer is None:
            return False
        expected = proof.prove(leader.secret, "member", nonces, claim)
        if not proof.proves(answer.proof.proof, expected):
            return await self._refuse("the secret is wrong")
        return await self._admit(hello)

    async def _admit(self, hello: pb.Hello) -> bool:
        leader = self._leader
        if leader.closing or leader.generation not in (None, hello.generation):
            return await self._refuse(
                f"this leader does not serve generation {hello.generation} of the job", again=True
            )
        identity = hello.identity
        self._member = Member(identity.rank, identity.host, identity.pid, identity.machine)
        group = leader.groups.setdefault(hello.generation, Group(leader.size, ended=leader.ended))
        why = group.refusal(self._member, hello.size)
        if why is not None:
            return await self._refuse(why)
        self._group = group
        self._outbox.put_nowait(pb.ToMember(welcome=pb.Welcome(job=group.job)))
        group.enter(self._member, self._outbox.put_nowait)
        return True

    async def _attend(self) -> None:
        """Serve the member until it leaves, dies or falls silent."""
        rank, self._heard = self._member.rank, time.monotonic()
        self._leader.attending += 1
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
            self._leader.attending -= 1

    async def _receive(self) -> bool:
        """Handle requests until the end; returns whether the member sent Leave."""
        loop, rank = asyncio.get_running_loop(), self._member.rank
        while (message := await self._read()) is not None:
            self._heard = time.monotonic()
            content = message.WhichOneof("content")
            if content == "leave":
                return True
            if content != "beat":
                self._leader.asked = self._heard
            if self._group.handle(rank, message):
                loop.call_later(max(0.0, message.timeout), self._group.expire, rank, message)
                if content == "assemble" and message.timeout > waiting.WARN_SECONDS:
                    loop.call_later(waiting.WARN_SECONDS, self._report_absent, message.timeout)
        return False

    def _report_absent(self, timeout: float) -> None:
        """Report the ranks that have not joined, once per group."""
        group = self._group
        if group.absent and not group.reported:
            group.reported = True
            whom = f"{ranks_text(group.absent)} of {group.size} to join"
            waiting.report(f"{whom}; every rank has to call allreduce.init()", timeout)

    async def _send(self) -> None:
        while True:
            await self._context.write(await self._outbox.get())

    async def _watch(self) -> None:
        """Return when the member has been silent too long while this process was running."""
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

    async def _read_small(self, expected: str) -> pb.FromMember | None:
        """Read a message before admission; None if it is not the expected one, or too large."""
        message = await self._read()
        if message is None or message.WhichOneof("content") != expected:
            return None
        if message.ByteSize() > GREETING_BYTES:
            await self._refuse(f"a {expected} of {message.ByteSize()} bytes came")
            return None
        return message

    async def _refuse(self, why: str, *, again: bool = False) -> bool:
        await self._context.write(pb.ToMember(refusal=pb.Refusal(why=why, again=again)))
        return False
