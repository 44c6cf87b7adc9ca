"""The leader's state of one generation of a job: members, values, and pending requests.

It has no socket, thread or clock: the caller passes messages in and reports expired waits, and
answers go out through each member's `send`. Everything runs on the leader's event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from allreduce.cluster.leader import leader_pb2 as pb
from allreduce.cluster.store import ENDING, VICTIM, remove
from allreduce.cluster.world import Member

Send = Callable[[pb.ToMember], None]


@dataclass
class Group:
    """The state of one generation of a job of `size` ranks."""

    size: int
    job: str = field(default_factory=lambda: secrets.token_hex(16))
    assembled: bool = False
    reported: bool = False  # whether absent ranks were reported
    first_lost: int | None = None  # the rank that died first; later deaths follow from it
    culprit: int | None = None  # the first lost rank that did not report to be a victim
    victims: set[int] = field(default_factory=set)
    ending: set[int] = field(default_factory=set)  # ranks that reported to be ending, or saving
    reasons: dict[int, str] = field(default_factory=dict)  # the errors by which some of them end
    left: set[int] = field(default_factory=set)  # ranks that left in good order
    ended: dict[int, Member] = field(default_factory=dict)  # processes that ended without joining
    joining: set[int] = field(default_factory=set)  # connected, have yet to ask for the members
    _members: dict[int, Member] = field(default_factory=dict)
    _send: dict[int, Send] = field(default_factory=dict)  # the members that are connected
    _gone: dict[int, str] = field(default_factory=dict)  # rank → reason, of an assembled group
    _lost: set[int] = field(default_factory=set)
    _values: dict[str, bytes] = field(default_factory=dict)
    _using: dict[str, set[int]] = field(default_factory=dict)  # prefix → ranks still using it
    _getting: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    _assembling: set[tuple[int, int]] = field(default_factory=set)

    @property
    def connected(self) -> list[int]:
        """The ranks that are connected now."""
        return sorted(self._send)

    @property
    def absent(self) -> list[int]:
        """The ranks that have not joined, while others wait for them."""
        return [rank for rank in range(self.size) if rank not in self._send and self._assembling]

    def refusal(self, member: Member, size: int) -> str | None:
        """Return why `member`, which expects `size` ranks, cannot join; None if it can."""
        rank = member.rank
        if size != self.size:
            return (
                f"rank {rank} says that the job has {size} ranks, but its leader expects "
                f"{self.size}; start every process with the same size"
            )
        if rank >= self.size:
            return (
                f"rank {rank} is out of range: the job has {self.size} ranks, 0 to {self.size - 1}"
            )
        holder = self._members.get(rank)
        if holder is None:
            return None
        if rank in self._gone:
            return f"rank {rank} has already taken part (process {holder.pid} on {holder.host})"
        return (
            f"rank {rank} is claimed twice: by process {holder.pid} on {holder.host}, which came "
            f"first, and by process {member.pid} on {member.host}; give each process its own "
            "rank"
        )

    def enter(self, member: Member, send: Send) -> None:
        """Admit a member that `refusal` accepted."""
        self._members[member.rank] = member
        self._send[member.rank] = send
        self.joining.add(member.rank)
        if len(self._send) == self.size:
            self.assembled = True
            everyone = self._members_message()
            for rank, request in self._assembling:
                self._answer(rank, pb.ToMember(request=request, members=everyone))
            self._assembling.clear()

    def leave(self, rank: int, reason: str, *, lost: bool) -> None:
        """Record the end of a member's connection: it left, or it is `lost`.

        While the group still assembles, its rank becomes free again.
        """
        if self._send.pop(rank, None) is None:
            return
        self.joining.discard(rank)
        for waiters in (*self._getting.values(), self._assembling):
            waiters -= {waiter for waiter in waiters if waiter[0] == rank}
        if not self.assembled:
            del self._members[rank]
            return
        self._gone[rank] = reason
        for prefix in list(self._using):
            self._forget(rank, prefix)
        if not self._send:
            self._values.clear()  # no member is left to read them
        if lost:
            self._lost.add(rank)
            self.first_lost = rank if self.first_lost is None else self.first_lost
            if self.culprit is None and rank not in self.victims:
                self.culprit = rank
            for key in list(self._getting):
                for waiter, request in self._getting.pop(key):
                    self._answer(waiter, self._gone_answer(request))
        else:
            self.left.add(rank)

    def handle(self, rank: int, message: pb.FromMember) -> bool:
        """Handle a member's request; returns whether it is pending, so that it can expire."""
        content = message.WhichOneof("content")
        if content == "set":
            if message.set.key == VICTIM:
                self.victims.add(rank)
            if message.set.key in (ENDING, VICTIM):
                self.ending.add(rank)
            if message.set.key == ENDING and message.set.value:
                self.reasons[rank] = message.set.value.decode(errors="replace")
            self._set(message.set.key, message.set.value)
            if message.request:
                self._answer(rank, pb.ToMember(request=message.request, done=pb.Done()))
            return False
        if content == "forget":
            users = set(message.forget.ranks).difference(self._gone)
            self._using.setdefault(message.forget.prefix, users)
            self._forget(rank, message.forget.prefix)
            return False
        if content == "get":
            return self._get(rank, message.request, message.get.key)
        if content == "assemble":
            return self._assemble(rank, message.request)
        self._answer(rank, pb.ToMember(beat=pb.Beat()))
        return False

    def expire(self, rank: int, message: pb.FromMember) -> None:
        """End a request that is still pending; the answer names the missing ranks."""
        content, waiter = message.WhichOneof("content"), (rank, message.request)
        if content == "get" and waiter in self._getting.get(message.get.key, ()):
            self._getting[message.get.key].discard(waiter)
            if not self._getting[message.get.key]:
                del self._getting[message.get.key]
            self._miss(*waiter, ())
        elif content == "assemble" and waiter in self._assembling:
            # Answer all: the member that gave up leaves, and would be named as missing next.
            missing = [r for r in range(self.size) if r not in self._send]
            for one in self._assembling:
                self._miss(*one, missing)
            self._assembling.clear()

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for rank, request in self._getting.pop(key, ()):
            self._answer(rank, pb.ToMember(request=request, value=pb.Value(value=value)))

    def _forget(self, rank: int, prefix: str) -> None:
        """Delete the keys if `rank` was the last that could use them."""
        self._using[prefix].discard(rank)
        if not self._using[prefix]:
            del self._using[prefix]
            remove(self._values, prefix)

    def _get(self, rank: int, request: int, key: str) -> bool:
        if key in self._values:
            value = pb.Value(value=self._values[key])
            self._answer(rank, pb.ToMember(request=request, value=value))
            return False
        if self._lost:
            self._answer(rank, self._gone_answer(request))
            return False
        self._getting.setdefault(key, set()).add((rank, request))
        return True

    def _assemble(self, rank: int, request: int) -> bool:
        self.joining.discard(rank)
        if self.assembled:
            self._answer(rank, pb.ToMember(request=request, members=self._members_message()))
            return False
        self._assembling.add((rank, request))
        self.give_up()
        return bool(self._assembling)

    def give_up(self) -> None:
        """Fail pending joins if an absent rank has ended without joining."""
        never = [rank for rank in self.absent if rank in self.ended]
        if never:
            reason = "it ended with exit code 0 before it called allreduce.init()"
            lost = pb.Lost(identity=_identity(self.ended[never[0]]), reason=reason)
            for rank, request in self._assembling:
                self._answer(rank, pb.ToMember(request=request, lost=lost))
            self._assembling.clear()

    def _members_message(self) -> pb.Members:
        return pb.Members(members=[_identity(self._members[rank]) for rank in range(self.size)])

    def _gone_answer(self, request: int) -> pb.ToMember:
        """Return the error for a request once a member is lost; names the first one."""
        rank = self.first_lost
        assert rank is not None, "a member is lost"
        lost = pb.Lost(identity=_identity(self._members[rank]), reason=self._gone[rank])
        return pb.ToMember(request=request, lost=lost)

    def _miss(self, rank: int, request: int, missing: Sequence[int]) -> None:
        self._answer(rank, pb.ToMember(request=request, missing=pb.Missing(ranks=missing)))

    def _answer(self, rank: int, message: pb.ToMember) -> None:
        send = self._send.get(rank)
        if send is not None:
            send(message)


def _identity(member: Member) -> pb.Identity:
    return pb.Identity(rank=member.rank, host=member.host, pid=member.pid, machine=member.machine)
