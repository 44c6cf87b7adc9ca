"""A member's view of the store that the group leader hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allreduce.cluster.leader import leader_pb2 as pb
from allreduce.cluster.leader.channel import LeaderChannel
from allreduce.cluster.leader.rpc import MAX_VALUE_BYTES
from allreduce.cluster.store import ENDING, SilentError, Store, ranks_text
from allreduce.cluster.world import LeaderLeftError, Member, lost
from allreduce.errors import ClosedError, InternalError, PeerLostError, TimeoutError, UsageError

if TYPE_CHECKING:  # the leader's side is imported where one is hosted
    from allreduce.cluster.leader.service import Leader

_ANSWER_MARGIN = 10.0  # seconds beyond a request's own timeout, which the leader enforces
_DRAIN_SECONDS = 10.0  # that a member hosting the leader stays for the others


class LeaderStore(Store):
    """The store that a group leader hosts.

    Args:
        whereabouts: The process that hosts the leader, for messages.
        hosted: The leader, if this process hosts it; it ends with the store.
    """

    def __init__(
        self, channel: LeaderChannel, rank: int, whereabouts: str, hosted: Leader | None
    ) -> None:
        self._channel, self._rank, self._whereabouts = channel, rank, whereabouts
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

    def post(self, key: str, value: bytes) -> None:
        fits = len(value) <= MAX_VALUE_BYTES  # a longer message would end the connection
        if fits and not self._closed and os.getpid() == self._pid:
            self._channel.send(pb.FromMember(set=pb.Set(key=key, value=bytes(value))))

    def delete_prefix(self, prefix: str, ranks: Sequence[int]) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._channel.send(pb.FromMember(forget=pb.Forget(prefix=prefix, ranks=ranks)))

    def get(self, key: str, timeout: float) -> bytes:
        answer = self._ask(pb.FromMember(get=pb.Get(key=key)), timeout)
        if answer.WhichOneof("content") == "missing":
            raise TimeoutError(
                f"[cluster] rank {self._rank}: no member set {key!r} within {timeout:g} s"
            )
        return answer.value.value

    def try_get(self, key: str, patience: float, timeout: float = 0.0) -> bytes | None:
        answer = self._answer(pb.FromMember(get=pb.Get(key=key)), timeout, patience)
        return None if answer.WhichOneof("content") == "missing" else answer.value.value

    def assemble(self, timeout: float) -> tuple[Member, ...]:
        """Wait until all members have joined; returns them by rank.

        Raises:
            TimeoutError: The message names the missing ranks.
        """
        answer = self._ask(pb.FromMember(assemble=pb.Assemble()), timeout)
        if answer.WhichOneof("content") == "missing":
            raise TimeoutError(
                f"[cluster] rank {self._rank}: {ranks_text(answer.missing.ranks)} did not join at "
                f"{self._channel.address} within {timeout:g} s; start all ranks, or raise "
                "ALLREDUCE_TIMEOUT"
            )
        return tuple(
            Member(one.rank, one.host, one.pid, one.machine) for one in answer.members.members
        )

    def close(self) -> None:
        if self._end():
            self._channel.close()
        if self._hosted is not None and os.getpid() == self._pid:
            hosted, self._hosted = self._hosted, None
            if self._abandoned:
                hosted.fail()
            else:
                hosted.close(_DRAIN_SECONDS)

    def abandon(self) -> None:
        """Close as if this process had died: the others learn that this member is lost.

        A leader in this process stays until `close()`: until then the others can read the reason
        from the store, and the transports report it, too.
        """
        if self._end():
            self._abandoned = True
            self._channel.abort()

    def _end(self) -> bool:
        """Mark the store closed; returns False if it was, or if this is a forked child."""
        if self._closed or os.getpid() != self._pid:
            return False
        self._closed = True
        return True

    def _ask(self, message: pb.FromMember, timeout: float) -> pb.ToMember:
        try:
            return self._answer(message, timeout, _ANSWER_MARGIN)
        except SilentError as error:
            raise self._leader_lost(error) from None

    def _answer(self, message: pb.FromMember, timeout: float, margin: float) -> pb.ToMember:
        if os.getpid() != self._pid:
            raise UsageError(
                f"[cluster] rank {self._rank}: process {os.getpid()} is a child of process "
                f"{self._pid}, which joined the job; only the process that joined can use its store"
            )
        if self._closed:
            raise ClosedError(f"[cluster] rank {self._rank}: the store is closed")
        try:
            answer = self._channel.ask(message, timeout, margin)
        except SilentError:
            raise
        except ConnectionError as error:
            raise self._leader_lost(error) from None
        content = answer.WhichOneof("content")
        if content == "lost":
            who = answer.lost.identity
            self.post(ENDING, b"")
            raise lost(self._rank, Member(who.rank, who.host, who.pid), answer.lost.reason)
        if content is None:
            raise InternalError(f"[cluster] rank {self._rank}: an empty answer came")
        return answer

    def _leader_lost(self, error: ConnectionError) -> ClosedError | PeerLostError:
        if self._closed:
            return ClosedError(f"[cluster] rank {self._rank}: the store was closed meanwhile")
        leader = f"the group leader at {self._channel.address}"
        if self._channel.left:
            return LeaderLeftError(
                f"[cluster] rank {self._rank}: {self._whereabouts}, which hosts {leader}, left "
                "normally, at the end of its program, but ranks find each other only through it; "
                "keep it running until all have met, for example by a barrier() after the last "
                "group"
            )
        return PeerLostError(
            f"[cluster] rank {self._rank}: {leader}, in {self._whereabouts}, is gone: {error}"
        )
