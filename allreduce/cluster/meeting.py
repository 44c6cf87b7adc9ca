"""Members meet at a group leader: they reach it, shake hands with it and wait for each other."""

from __future__ import annotations

import os
import queue
import socket
import time
from dataclasses import dataclass, field

from allreduce.cluster import leader_pb2 as pb
from allreduce.cluster import proof
from allreduce.cluster.address import check_secret
from allreduce.cluster.base import World
from allreduce.cluster.client import LeaderStore, Line
from allreduce.cluster.rpc import PROTOCOL
from allreduce.cluster.service import Leader
from allreduce.cluster.waiting import Wait
from allreduce.errors import JoinError, TimeoutError

_PATIENCE = 8.0  # seconds to reach a leader; with the rest of joining this stays below 10
_AGAIN_SECONDS = 0.1
_SILENCE = 10.0  # a short timeout must not turn a pause between two heartbeats into a death


class _LaterError(ConnectionError):
    """The leader is another generation's, of the same job."""


@dataclass(frozen=True)
class Meeting:
    """Where and as whom to join.

    Args:
        whereabouts: Which process hosts the leader, for messages: "the launcher".
        hosted: The leader, where this process hosts it.
        deaf: Why it does not, where it should.
    """

    rank: int
    size: int
    address: str
    secret: bytes = field(repr=False)
    generation: int
    timeout: float
    source: str
    why: str
    whereabouts: str
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
                self.hosted.close()
            raise

    def _join(self) -> World:
        check_secret(self.address, self.secret)
        line, job = self._connect()
        store = LeaderStore(line, self.rank, self.whereabouts, self.hosted)
        try:
            members = store.assemble(self.timeout)
        except TimeoutError:
            store.close()  # a leader that this process hosts stays until the others know, too
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
        )

    def _connect(self) -> tuple[Line, str]:
        began = time.monotonic()
        deadline, wait = began + _PATIENCE, Wait(self.timeout)
        while True:
            remaining = deadline - time.monotonic()
            try:
                line = Line(self.address, max(0.1, remaining), max(self.timeout, _SILENCE))
                return line, self._shake_hands(line, max(1.0, remaining))
            except ConnectionError as error:
                now = time.monotonic()
                if isinstance(error, _LaterError):  # it lives: its successor has time, too
                    deadline = max(deadline, min(now + _PATIENCE, began + self.timeout))
                    wait.goes_on(f"{self.whereabouts} to host the next leader: {error}")
                if now + _AGAIN_SECONDS >= deadline:
                    raise self._unreachable(error) from None
                time.sleep(_AGAIN_SECONDS)

    def _unreachable(self, error: ConnectionError) -> JoinError:
        return JoinError(
            f"[cluster] rank {self.rank}: no group leader is reachable at {self.address} within "
            f"{_PATIENCE:g} s ({error}); {self.whereabouts} should host it: start that first, and "
            "check ALLREDUCE_LEADER"
            + (f"; this process could not host it either: {self.deaf}" if self.deaf else "")
        )

    def _shake_hands(self, line: Line, patience: float) -> str:
        """Prove and be proved to; returns the job's id.

        Raises:
            ConnectionError: The leader went away, or asks to be tried again.
            JoinError: It refused, or does not know the secret.
        """
        try:
            return self._exchange_proofs(line, patience)
        except BaseException:
            line.cut()
            raise

    def _exchange_proofs(self, line: Line, patience: float) -> str:
        pid, mine = os.getpid(), proof.nonce()
        claim = (self.rank, self.size, self.generation, pid)
        hello = pb.Hello(
            protocol=PROTOCOL,
            size=self.size,
            generation=self.generation,
            identity=pb.Identity(rank=self.rank, host=socket.gethostname(), pid=pid),
            nonce=mine,
        )
        line.send(pb.FromMember(hello=hello))
        challenge = self._greeting(line, "challenge", patience).challenge
        nonces = (mine, challenge.nonce)
        expected = proof.prove(self.secret, "leader", nonces, claim)
        whole = len(challenge.nonce) == proof.NONCE_BYTES
        if not (whole and proof.proves(challenge.proof, expected)):
            raise JoinError(
                f"[cluster] rank {self.rank}: the group leader at {self.address} does not know "
                "this process's secret; give all ranks the same ALLREDUCE_SECRET, and check that "
                "ALLREDUCE_LEADER is of the same job"
            )
        shown = proof.prove(self.secret, "member", nonces, claim)
        line.send(pb.FromMember(proof=pb.Proof(proof=shown)))
        return self._greeting(line, "welcome", patience).welcome.job

    def _greeting(self, line: Line, expected: str, patience: float) -> pb.ToMember:
        try:
            message = line.greetings.get(timeout=patience)
        except queue.Empty:
            raise ConnectionError("what listens there is no group leader of ours") from None
        if message is None:
            raise ConnectionError(line.broken or "it ended the connection")
        content = message.WhichOneof("content")
        if content == "refusal" and message.refusal.again:
            raise _LaterError(message.refusal.why)
        if content == "refusal":
            raise JoinError(
                f"[cluster] rank {self.rank}: the group leader at {self.address} refused this "
                f"process: {message.refusal.why}"
            )
        if content != expected:
            raise JoinError(
                f"[cluster] rank {self.rank}: the group leader at {self.address} sent {content} "
                f"where {expected} belongs; install the same version of allreduce everywhere"
            )
        return message
