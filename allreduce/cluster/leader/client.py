"""The store that a group leader keeps, as a member has it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allreduce.cluster.leader import leader_pb2 as pb
from allreduce.cluster.leader.channel import Line
from allreduce.cluster.leader.rpc import MAX_VALUE_BYTES
from allreduce.cluster.store import ENDING, SilentError
from allreduce.cluster.world import LeaderLeftError, Member, Store, lost, ranks_text
from allreduce.errors import ClosedError, InternalError, PeerLostError, TimeoutError, UsageError

if TYPE_CHECKING:  # the leader's side is imported where one is hosted
    from allreduce.cluster.leader.service import Leader

_ANSWER_MARGIN = 10.0  # beyond a request's own timeout, which the leader keeps
_DRAIN_SECONDS = 10.0  # how long a member that hosts the leader stays for the others


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

    def post(self, key: str, value: bytes) -> None:
        fits = len(value) <= MAX_VALUE_BYTES  # what is longer would end the connection
        if fits and not self._closed and os.getpid() == self._pid:
            self._line.send(pb.FromMember(set=pb.Set(key=key, value=bytes(value))))

    def delete_prefix(self, prefix: str, ranks: Sequence[int]) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._line.send(pb.FromMember(forget=pb.Forget(prefix=prefix, ranks=ranks)))

    def get(self, key: str, timeout: float) -> bytes:
        answer = self._ask(pb.FromMember(get=pb.Get(key=key)), timeout)
        if answer.WhichOneof("content") == "missing":
            raise TimeoutError(
                f"[cluster] rank {self._rank}: nobody set {key!r} within {timeout:g} s"
            )
        return answer.value.value

    def try_get(self, key: str, patience: float, timeout: float = 0.0) -> bytes | None:
        answer = self._answer(pb.FromMember(get=pb.Get(key=key)), timeout, patience)
        return None if answer.WhichOneof("content") == "missing" else answer.value.value

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
            answer = self._line.ask(message, timeout, margin)
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
