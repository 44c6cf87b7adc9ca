"""Join a job at its group leader: connect, prove the secret, and wait for the other members."""

from __future__ import annotations

import itertools
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allreduce.cluster.host import limits
from allreduce.cluster.host.address import LOOPBACK, check_loopback, check_secret, split
from allreduce.cluster.host.interfaces import source_address
from allreduce.cluster.host.machine import identity
from allreduce.cluster.host.waiting import Wait
from allreduce.cluster.leader import leader_pb2 as pb
from allreduce.cluster.leader import proof
from allreduce.cluster.leader.channel import LeaderChannel
from allreduce.cluster.leader.client import LeaderStore
from allreduce.cluster.leader.rpc import PROTOCOL, longest_silence
from allreduce.cluster.world import World
from allreduce.errors import JoinError, TimeoutError
from allreduce.events import logger

if TYPE_CHECKING:  # the leader's side is imported where one is hosted
    from allreduce.cluster.leader.service import Leader

PATIENCE = 8.0  # seconds to reach a leader, so that joining takes less than 10
_AGAIN_SECONDS = 0.1
_ONE_OF_SEVERAL_SECONDS = 1.0  # before the next address is tried


class _LaterError(ConnectionError):
    """The leader serves another generation of the same job."""


@dataclass(eq=False, repr=False)  # it has a secret
class Meeting:
    """The leader's address and the rank with which to join.

    Args:
        addresses: `host:port` of the leader; several if it may listen at any of them, among
            other servers.
        whereabouts: The process that hosts the leader, for messages: "the launcher".
        patience: Seconds to reach it.
        hosted: The leader, if this process hosts it.
        deaf: Why this process does not host it although it should.
    """

    rank: int
    size: int
    addresses: tuple[str, ...]
    secret: bytes
    generation: int
    timeout: float
    source: str
    why: str
    whereabouts: str
    patience: float
    hosted: Leader | None = None
    deaf: str = ""

    def join(self) -> World:
        """Connect, shake hands and wait for all members.

        Raises:
            JoinError: The leader cannot be reached, or one side refuses the other.
            TimeoutError: Some rank did not join within `timeout`.
        """
        try:
            return self._join()
        except BaseException:
            if self.hosted is not None:
                self.hosted.fail()
            raise

    def _join(self) -> World:
        for address in self.addresses:
            check_secret(address, self.secret)
            check_loopback(address)
        wanted = f"[cluster] rank {self.rank}: cannot call the group leader"
        limits.check_files(limits.CHANNEL_FILES, wanted)
        limits.check_address_space(limits.CHANNEL_THREADS, wanted)
        channel, job = self._connect()
        store = LeaderStore(channel, self.rank, self.whereabouts, self.hosted)
        try:
            members = store.assemble(self.timeout)
        except TimeoutError:
            store.close()  # a hosted leader stays until the others know, too
            raise
        except BaseException:
            store.abandon()
            raise
        return World(
            generation=self.generation,
            rank=self.rank,
            size=self.size,
            members=members,
            source=self.source,
            why=self.why,
            job=job,
            secret=self.secret,
            store=store,
            address=source_address(split(channel.address)[0]) or LOOPBACK,
        )

    def _connect(self) -> tuple[LeaderChannel, str]:
        began = time.monotonic()
        deadline, wait = began + self.patience, Wait(self.timeout)
        for address in itertools.cycle(self.addresses):
            remaining = max(0.1, deadline - time.monotonic())
            if len(self.addresses) > 1:
                remaining = min(remaining, _ONE_OF_SEVERAL_SECONDS)
            try:
                channel = LeaderChannel(address, longest_silence(self.timeout))
                # Half of it: a leader that closes may take a call that it never answers.
                return channel, self._shake_hands(
                    channel, max(1.0, min(remaining, self.patience / 2))
                )
            except JoinError as error:  # perhaps another job's leader is there
                if len(self.addresses) == 1 or time.monotonic() >= deadline:
                    raise
                logger.debug("%s", error)
            except ConnectionError as error:
                now = time.monotonic()
                if isinstance(error, _LaterError):  # it lives: wait for its successor
                    deadline = max(deadline, min(now + self.patience, began + self.timeout))
                    wait.has_time_left(f"{self.whereabouts} to host the next leader: {error}")
                if now + _AGAIN_SECONDS >= deadline:
                    raise self._unreachable(error) from None
                time.sleep(_AGAIN_SECONDS)
            wait.has_time_left(
                f"{self.whereabouts}, which hosts the leader; every task has to join"
            )
        raise AssertionError("there is an address to try")

    def _unreachable(self, error: ConnectionError) -> JoinError:
        return JoinError(
            f"[cluster] rank {self.rank}: no group leader is reachable at "
            f"{' or '.join(self.addresses)} within {self.patience:g} s ({error}); "
            f"{self.whereabouts} should host it: start that first, and check ALLREDUCE_LEADER"
            + (f"; this process could not host it either: {self.deaf}" if self.deaf else "")
        )

    def _shake_hands(self, channel: LeaderChannel, patience: float) -> str:
        """Exchange proofs of the secret; returns the job's id.

        Raises:
            ConnectionError: The leader went away, or asks for another attempt.
            JoinError: It refused this process, or does not know the secret.
        """
        try:
            return self._exchange_proofs(channel, patience)
        except BaseException:
            channel.abort()
            raise

    def _exchange_proofs(self, channel: LeaderChannel, patience: float) -> str:
        pid, mine = os.getpid(), proof.nonce()
        claim = (self.rank, self.size, self.generation, pid)
        hello = pb.Hello(
            protocol=PROTOCOL,
            size=self.size,
            generation=self.generation,
            identity=pb.Identity(
                rank=self.rank, host=socket.gethostname(), pid=pid, machine=identity()
            ),
            nonce=mine,
        )
        channel.send(pb.FromMember(hello=hello))
        challenge = self._greeting(channel, "challenge", patience).challenge
        nonces = (mine, challenge.nonce)
        expected = proof.prove(self.secret, "leader", nonces, claim)
        whole = len(challenge.nonce) == proof.NONCE_BYTES
        if not (whole and proof.proves(challenge.proof, expected)):
            raise JoinError(
                f"[cluster] rank {self.rank}: the group leader at {channel.address} does not know "
                "this process's secret; give all ranks the same ALLREDUCE_SECRET, and check that "
                "ALLREDUCE_LEADER is of the same job"
            )
        shown = proof.prove(self.secret, "member", nonces, claim)
        channel.send(pb.FromMember(proof=pb.Proof(proof=shown)))
        return self._greeting(channel, "welcome", patience).welcome.job

    def _greeting(self, channel: LeaderChannel, expected: str, patience: float) -> pb.ToMember:
        message = channel.greeting(patience)
        content = message.WhichOneof("content")
        if content == "refusal" and message.refusal.again:
            raise _LaterError(message.refusal.why)
        if content == "refusal":
            raise JoinError(
                f"[cluster] rank {self.rank}: the group leader at {channel.address} refused this "
                f"process: {message.refusal.why}"
            )
        if content != expected:
            raise JoinError(
                f"[cluster] rank {self.rank}: the group leader at {channel.address} sent {content} "
                f"where {expected} belongs; install the same version of allreduce everywhere"
            )
        return message
