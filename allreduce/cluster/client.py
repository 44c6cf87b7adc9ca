"""A member's side of the group leader: the connection, and the `Store` over it."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import TYPE_CHECKING

from allreduce.cluster import forks
from allreduce.cluster import leader_pb2 as pb
from allreduce.cluster.address import unresolved
from allreduce.cluster.base import LeaderLeftError, Member, Store, lost, ranks_text
from allreduce.cluster.rpc import (
    BEAT_SECONDS,
    CHANNEL_OPTIONS,
    LEFT,
    MAX_VALUE_BYTES,
    grpc,
    leader_pb2_grpc,
)
from allreduce.errors import ClosedError, InternalError, PeerLostError, TimeoutError, UsageError

if TYPE_CHECKING:  # the leader's side is imported where one is hosted
    from allreduce.cluster.service import Leader

_ASK_SECONDS = 0.5  # after which a channel is asked again to connect
_GOODBYE_SECONDS = 2.0
_DRAIN_SECONDS = 10.0  # how long a member that hosts the leader stays for the others
_ANSWER_MARGIN = 10.0  # beyond a request's own timeout, which the leader keeps


class Line:
    """One open call to the leader: answers find their requests, silence sends heartbeats.

    Args:
        address: The leader's `host:port`.
        patience: Seconds within which it must be reachable.
        silence: Seconds without a word from the leader after which it counts as gone.

    Raises:
        ConnectionError: It is not reachable.
    """

    def __init__(self, address: str, patience: float, silence: float) -> None:
        self.address, self._silence = address, silence
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        forks.hold(self)
        if not self._reached(patience):
            self._channel.close()
            forks.release(self)
            raise ConnectionError(unresolved(address) or f"nothing answers at {address}")
        self.greetings: queue.SimpleQueue[pb.ToMember | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[pb.FromMember | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[int, futures.Future[pb.ToMember]] = {}
        self._numbers = itertools.count(1)
        self.broken: str | None = None
        self.left = False  # whether it is broken because the leader's host left in good order
        self._heard = time.monotonic()
        stub = leader_pb2_grpc.LeaderStub(self._channel)  # type: ignore[no-untyped-call]
        self._call = stub.Attend(self._requests())
        self._reader = threading.Thread(target=self._read, name="allreduce-member", daemon=True)
        self._reader.start()

    def _reached(self, patience: float) -> bool:
        """Wait until the leader answers; says whether it does."""
        until = time.monotonic() + patience
        while (remaining := until - time.monotonic()) > 0:
            # A connection that a leader ends as it comes, because it closes, leaves the channel
            # idle: it does not connect to the next leader until it is asked again.
            ready = grpc.channel_ready_future(self._channel)
            try:
                ready.result(timeout=min(remaining, _ASK_SECONDS))
                return True
            except grpc.FutureTimeoutError:
                ready.cancel()
        return False

    def send(self, message: pb.FromMember) -> None:
        """Send without awaiting an answer."""
        self._outbox.put(message)

    def ask(self, message: pb.FromMember, timeout: float) -> pb.ToMember:
        """Send and wait for the answer, which the leader may hold back for `timeout` seconds.

        Raises:
            ConnectionError: The leader is gone.
        """
        answer: futures.Future[pb.ToMember] = futures.Future()
        message.timeout = timeout
        with self._lock:
            if self.broken is not None:
                raise ConnectionError(self.broken)
            message.request = next(self._numbers)
            self._pending[message.request] = answer
        self._outbox.put(message)
        try:
            return answer.result(timeout + _ANSWER_MARGIN)
        except futures.TimeoutError:
            raise ConnectionError("it does not answer") from None
        finally:
            with self._lock:
                self._pending.pop(message.request, None)

    def hang_up(self) -> None:
        """Say goodbye and close; the leader then knows that nothing went wrong."""
        self.send(pb.FromMember(leave=pb.Leave()))
        self._outbox.put(None)
        self._reader.join(_GOODBYE_SECONDS)
        self.cut()

    def cut(self) -> None:
        """Close without a word, as a death would."""
        self._outbox.put(None)
        self._call.cancel()
        self._channel.close()
        forks.release(self)

    def _requests(self) -> Iterator[pb.FromMember]:
        while True:
            asked = time.monotonic()
            try:
                message = self._outbox.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                if time.monotonic() - asked > 5 * BEAT_SECONDS:  # we were stopped or starved
                    self._heard = time.monotonic()
                if time.monotonic() - self._heard > self._silence:
                    self._break(f"it has been silent for {self._silence:g} s")
                    self._call.cancel()
                    return
                message = pb.FromMember(beat=pb.Beat())
            if message is None:
                return
            yield message

    def _read(self) -> None:
        reason = "it ended the connection"
        try:
            for message in self._call:
                self._heard = time.monotonic()
                self._dispatch(message)
            self.left = any(key == LEFT for key, _ in self._call.trailing_metadata())
        except grpc.RpcError:
            reason = self._call.details() or reason
        self._break(reason)

    def _dispatch(self, message: pb.ToMember) -> None:
        if message.request:
            with self._lock:
                answer = self._pending.pop(message.request, None)
            if answer is not None:
                answer.set_result(message)
        elif message.WhichOneof("content") != "beat":
            self.greetings.put(message)

    def _break(self, reason: str) -> None:
        with self._lock:
            self.broken = self.broken or reason
            pending, self._pending = self._pending, {}
        for answer in pending.values():
            answer.set_exception(ConnectionError(self.broken))
        self.greetings.put(None)


class LeaderStore(Store):
    """The store that a group leader keeps.

    Args:
        line: An open line whose handshake is done.
        rank: Whose store this is.
        whereabouts: Which process hosts the leader, for messages.
        hosted: The leader itself where this process hosts it; it then ends with the store.
    """

    def __init__(self, line: Line, rank: int, whereabouts: str, hosted: Leader | None) -> None:
        self._line, self._rank, self._whereabouts = line, rank, whereabouts
        self._hosted = hosted
        self._pid = os.getpid()
        self._closed = self._abandoned = False

    def set(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise UsageError(
                f"[cluster] rank {self._rank}: the value of {key!r} has {len(value)} bytes; the "
                f"store takes at most {MAX_VALUE_BYTES}: use a collective for arrays"
            )
        self._ask(pb.FromMember(set=pb.Set(key=key, value=bytes(value))), _ANSWER_MARGIN)

    def tell(self, key: str, value: bytes) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._line.send(pb.FromMember(set=pb.Set(key=key, value=bytes(value))))

    def forget(self, prefix: str, ranks: Sequence[int]) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._line.send(pb.FromMember(forget=pb.Forget(prefix=prefix, ranks=ranks)))

    def get(self, key: str, timeout: float) -> bytes:
        answer = self._ask(pb.FromMember(get=pb.Get(key=key)), timeout)
        if answer.WhichOneof("content") == "missing":
            raise TimeoutError(
                f"[cluster] rank {self._rank}: nobody set {key!r} within {timeout:g} s"
            )
        return answer.value.value

    def barrier(self, name: str, timeout: float) -> None:
        answer = self._ask(pb.FromMember(enter=pb.Enter(barrier=name)), timeout)
        if answer.WhichOneof("content") == "missing":
            raise TimeoutError(
                f"[cluster] rank {self._rank}: {ranks_text(answer.missing.ranks)} did not come to "
                f"the barrier {name!r} within {timeout:g} s"
            )

    def assemble(self, timeout: float) -> tuple[Member, ...]:
        """Wait until all members are there and return them, by rank.

        Raises:
            TimeoutError: The message names the missing ranks.
        """
        answer = self._ask(pb.FromMember(assemble=pb.Assemble()), timeout)
        if answer.WhichOneof("content") == "missing":
            raise TimeoutError(
                f"[cluster] rank {self._rank}: {ranks_text(answer.missing.ranks)} did not join at "
                f"{self._line.address} within {timeout:g} s; start all ranks, or raise "
                "ALLREDUCE_TIMEOUT"
            )
        return tuple(
            Member(one.rank, one.host, one.pid, one.machine) for one in answer.members.members
        )

    def close(self) -> None:
        if self._end():
            self._line.hang_up()
        if self._hosted is not None and os.getpid() == self._pid:
            hosted, self._hosted = self._hosted, None
            if self._abandoned:
                hosted.fail()
            else:
                hosted.close(_DRAIN_SECONDS)

    def abandon(self) -> None:
        """Close as a death would: the others learn that this member is lost.

        A leader that this process hosts stays until `close()`, where the others have heard of it
        from this member's transports, too: what has ended this one may stand in the store for all.
        """
        if self._end():
            self._abandoned = True
            self._line.cut()

    def _end(self) -> bool:
        """Mark the store closed; returns whether there is something to close in this process."""
        if self._closed or os.getpid() != self._pid:
            return False
        self._closed = True
        return True

    def _ask(self, message: pb.FromMember, timeout: float) -> pb.ToMember:
        if os.getpid() != self._pid:
            raise UsageError(
                f"[cluster] rank {self._rank}: process {os.getpid()} is a child of process "
                f"{self._pid}, which joined the job; only the process that joined can use its store"
            )
        if self._closed:
            raise ClosedError(f"[cluster] rank {self._rank}: the store is closed")
        try:
            answer = self._line.ask(message, timeout)
        except ConnectionError as error:
            raise self._leader_lost(error) from None
        content = answer.WhichOneof("content")
        if content == "lost":
            who = answer.lost.identity
            raise lost(self._rank, Member(who.rank, who.host, who.pid), answer.lost.reason)
        if content is None:
            raise InternalError(f"[cluster] rank {self._rank}: an empty answer came")
        return answer

    def _leader_lost(self, error: ConnectionError) -> ClosedError | PeerLostError:
        if self._closed:
            return ClosedError(f"[cluster] rank {self._rank}: the store was closed meanwhile")
        leader = f"the group leader at {self._line.address}"
        if self._line.left:
            return LeaderLeftError(
                f"[cluster] rank {self._rank}: {self._whereabouts}, which hosts {leader}, left "
                "normally, by the end of its program, and ranks find each other through it alone; "
                "have it stay until all have met, as by a barrier() behind the last group"
            )
        return PeerLostError(
            f"[cluster] rank {self._rank}: {leader}, in {self._whereabouts}, is gone: {error}"
        )
