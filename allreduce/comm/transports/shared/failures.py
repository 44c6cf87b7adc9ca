"""Failure reports of members that share memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar

from allreduce import _native
from allreduce.comm.calls.call import ANY, COLLECTIVES, DTYPES, PATHS, Call, from_native
from allreduce.comm.calls.call_site import Note
from allreduce.comm.failures.mismatch import Side, describe
from allreduce.comm.failures.reporter import FailureReporter, build_error
from allreduce.errors import AllreduceError, Finding

_NOTE_SECONDS = 0.5  # for a failing member to post its note
_POLL_SECONDS = 0.002


def message_word(collective: str, peer: int) -> int:
    """Encode a send or recv that a member waits in, for shared memory; 0 means none."""
    return (peer + 2) << 1 | (collective == "recv")


class SharedFailureReporter(FailureReporter[_native.Group]):
    """Reads the failure from shared memory; also one in a message, which only two members know."""

    transport: ClassVar[str] = "shared"

    def read(self, words: Any) -> Call:
        return from_native(words, self.name)

    def call(self, member: int, seq: int) -> Call | None:
        found = super().call(member, seq)
        note = self.group.note(member, seq)
        if found is None or note is None:
            return found
        return replace(found, call_text=Note.unpack(note).call_text)

    def missing(self, seq: int) -> str:
        """As on other transports; but if all have made the call, list those still working on it."""
        unfinished = self.absent(seq)
        if self.me not in unfinished or self.group.posted_call(self.me, seq) is None:
            return super().missing(seq)
        others = []
        for member in unfinished:
            if member != self.me:
                waits = self.message_of(member)
                state = self.members[member].state + (f", {waits}" if waits else "")
                others.append(f"{self.members[member]} ({state})")
        also = f" and on {', '.join(others)}" if others else ""
        return f"all ranks have made the call, and it is still in progress here{also}"

    def last_call(self, member: int) -> str:
        """As on other transports, with the message that the member waits in."""
        last, waits = super().last_call(member), self.message_of(member)
        return f"{last}, and {waits}" if waits else last

    def message_of(self, member: int) -> str:
        """Describe the message that a member waits in; empty if it waits in none."""
        word = self.group.message(member)
        if not word:
            return ""
        peer = (word >> 1) - 2
        whom = "any rank" if peer == ANY else str(self.members[peer])
        return f"waits in a {'recv' if word & 1 else 'send'} for {whom}"

    def note(self, member: int, seq: int) -> Note:
        """Return a member's note on a call; wait, as it may post it only after the failure."""
        until = time.monotonic() + _NOTE_SECONDS
        while (note := self.group.note(member, seq)) is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return Note("", "") if note is None else Note.unpack(note)

    def difference(self, low: int, high: int, seq: int) -> str:
        paths = {member: self._path(member, seq) for member in (low, high)}
        if paths[low] != paths[high]:
            symmetric, other = (low, high) if paths[low] == "direct" else (high, low)
            return (
                f"{self.members[symmetric]} passes arrays of comm.empty, but {self.members[other]} "
                "ordinary ones: pass arrays of comm.empty on every rank, or on none"
            )
        if paths[low] == "direct" and self.note(low, seq).shape == self.note(high, seq).shape:
            return "every rank must pass the array of the same comm.empty call"
        return ""

    def _path(self, member: int, seq: int) -> str:
        words = self.group.posted_call(member, seq)
        return PATHS[words[3]] if words is not None else "unknown"

    def waiting(self, work: _native.Work) -> str:
        """Describe the call of a work and the members that it waits for."""
        if not work.seq & _native.MESSAGE:
            return f"{self.named(self.me, work.seq)}: {self.missing(work.seq)}"
        call = self._posted(work)
        return f"{call}: {self._absent(call)}"

    def made(self, native: _native.Work) -> Call | None:
        return self._posted(native) if native.seq & _native.MESSAGE else super().made(native)

    def error(self, native: _native.Work | None = None, own: Call | None = None) -> AllreduceError:
        found = self.group.culprit()
        assert found is not None, "only a dead communicator has an error"
        fault, member, observer, seq, reason = found
        if not seq & _native.MESSAGE:
            return super().error(native, own)
        sides = self.group.mismatch(observer)
        call = self._message(*sides[0][:5])
        blamed = self.members[member]
        if fault == "mismatch":
            by = str(self.members[observer])
            received = Side(by, call, Note.unpack(sides[0][5]), observer == self.me)
            peer, here = self._message(*sides[1][:5]), member == self.me != observer
            sent = Side(str(blamed), peer, Note.unpack(sides[1][5]), here)
            return build_error(
                self.where, Finding("mismatch", describe("a message", sent, received))
            )
        if fault in ("lost", "left"):
            own = own or (None if native is None else self.made(native))
            if native is not None and own is not None:
                return self.peer_lost_error(fault, member, self.me, own, native.seq)
            return self.peer_lost_error(fault, member, observer, call)
        return self.timeout_error(observer, str(call), reason, self._absent(call))

    def _absent(self, call: Call) -> str:
        """Describe the member that a message waits for."""
        if call.root is None or call.root == ANY:
            stopped = [f"{m} ({m.state})" for m in self.members if m.index != self.me and m.stopped]
            return "; ".join(["no other member has sent a matching message", *stopped])
        peer = self.members[call.root]
        did = "has not received it" if call.collective == "send" else "has not sent it"
        found = self.group.last_call(call.root)
        last = f"; its last collective was {self.read(found[1])} #{found[0]}" if found else ""
        waits = self.message_of(call.root)
        both = call.collective == "send" and waits == f"waits in a send for {self.members[self.me]}"
        mend = "; of two that send to each other, one must receive first" if both else ""
        return f"{peer} {did}{waits and f', and {waits}'} ({peer.state}{last}){mend}"

    def _posted(self, work: _native.Work) -> Call:
        """Return the message of a work of this member."""
        collective, _, dtype, _, peer, count = work.call
        return self._message(collective, dtype, peer, count, work.tag)

    def _message(self, collective: int, dtype: int, peer: int, count: int, tag: int) -> Call:
        return Call(COLLECTIVES[collective], None, DTYPES[dtype], count, peer, self.name, tag=tag)
