"""Failure reports of members that are connected over TCP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from allreduce import _native
from allreduce.comm.calls.call import MESSAGES, Call
from allreduce.comm.calls.call_site import Note
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.failures.reporter import FailureReporter, build_error
from allreduce.comm.transports.tcp.calls import decode, note_of
from allreduce.errors import AllreduceError, Finding

NOBODY = -1  # awaited by a member without a long wait; its own index means any other


@dataclass(frozen=True)
class TcpMemberInfo(MemberInfo):
    """One member of a tcp communicator, perhaps on another host."""

    host: str
    near: bool  # whether on this process's host; equal host names do not prove that

    @property
    def state(self) -> str:
        return super().state if self.near else f"process {self.pid} on {self.host}"

    @property
    def lost(self) -> str:
        cause = super().lost
        return cause if self.near else f"{cause}; or {self.host} cannot be reached any more"


class TcpFailureReporter(FailureReporter[_native.TcpMember]):
    """Reports failures with the calls that members have posted in frames."""

    transport: ClassVar[str] = "tcp"

    def error(
        self, native: _native.TcpWork | None = None, own: Call | None = None
    ) -> AllreduceError:
        found = self.group.culprit()
        if found is None or found[0] != "lost" or not found[4]:
            return super().error(native, own)
        blamed = self.members[found[1]]
        text = (
            f"{blamed} (process {blamed.pid}) broke the protocol: {found[4]}; the communicator "
            "is dead; install the same version of allreduce everywhere"
        )
        return build_error(self.where, Finding("lost", text))

    def read(self, words: Any) -> Call:
        return decode(words, self.name)

    def made(self, native: _native.TcpWork) -> Call | None:
        return self.call(self.me, native.key)

    def note(self, member: int, seq: int) -> Note:
        posted = self.group.posted_call(member, seq)
        return Note("", "") if posted is None else Note.unpack(note_of(posted))

    def absent(self, seq: int) -> list[int]:
        """Return the awaited members, stopped ones of this host first.

        Once all have begun the call, follow the chain of waits and omit members that wait
        themselves.
        """
        missing = self.group.missing(seq)
        stopped = [m.index for m in self.members if m.index != self.me and m.stopped]
        if self.group.absent(seq):
            stopped = [m for m in stopped if m in missing]
            behind = missing
        else:
            ends = (self._end_of_chain(m, seq) for m in missing if m not in stopped)
            behind = [m for m in ends if m is not None]
        return list(dict.fromkeys([*stopped, *behind])) or missing

    def _end_of_chain(self, member: int, seq: int) -> int | None:
        """Return the member at the end of the chain of waits from `member` in a call.

        Live members announce the member that they wait for. Members may wait for each other; then
        return None.
        """
        seen = {self.me}
        while member not in seen:
            seen.add(member)
            awaited = self.group.awaited_in_call(member, seq)
            if awaited == NOBODY:
                return member
            member = awaited
        return None

    def last_call(self, member: int) -> str:
        """As on other transports, with the call site."""
        found = self.group.last_call(member)
        last = super().last_call(member)
        if found is not None:
            last += f" at {Note.unpack(note_of(found[1])).site}"
        awaited = NOBODY if member == self.me else self.group.awaited(member)
        return last if awaited == NOBODY else f"{last}, and {self._waits(member, awaited)}"

    def _waits(self, member: int, awaited: int) -> str:
        """Describe the wait of a member."""
        peer = "any rank" if awaited == member else self.members[awaited]
        call = self.group.awaited_in(member)
        kind = f"in a {MESSAGES[call - 1]} " if 0 < call <= len(MESSAGES) else ""
        return f"waits {kind}for {peer}"

    def difference(self, low: int, high: int, seq: int) -> str:
        """Describe the shares of an all_to_all that do not match, if it is one."""
        first, second = self.call(low, seq), self.call(high, seq)
        assert first is not None, "the calls were compared before"
        assert second is not None, "both of them"
        for sends, gets, a, b in ((first, second, low, high), (second, first, high, low)):
            if sends.counts and gets.receives and sends.counts[b] != gets.receives[a]:
                return (
                    f"{sends.counts[b]} elements go from {self.members[a]} to {self.members[b]}, "
                    f"which expects {gets.receives[a]}"
                )
        return ""
