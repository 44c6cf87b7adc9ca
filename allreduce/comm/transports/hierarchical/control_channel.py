"""All members of a hierarchical communicator, connected each with each: who calls what, who lives.

Every call is posted here to all members, without data, before any output is written; messages and
all_to_all go here whole. Whatever happens in a smaller communicator becomes one fault here, so that
all members tell one story.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

from allreduce.comm.calls.call import Array, Call
from allreduce.comm.failures.reporter import encode, group_text
from allreduce.comm.transports.tcp.calls import check, words
from allreduce.comm.transports.tcp.failures import TcpFailureReporter
from allreduce.comm.transports.tcp.transport import TcpTransport, TcpWork
from allreduce.errors import AllreduceError, Finding

_VERDICT_SECONDS = 0.3  # for this communicator to find out by itself; a mismatch takes its time:
_MISMATCH_SECONDS = 0.8  # others may have to post their calls first
_LOOK_SECONDS = 0.002


class HierarchicalFailureReporter(TcpFailureReporter):
    """As a tcp transport's, under another name."""

    transport: ClassVar[str] = "hierarchical"

    @property
    def where(self) -> str:
        """As of the communicator, of which all levels are parts: "world.1/split.1/all"."""
        group = group_text(self.name.rpartition("/")[0])
        return f"[{self.transport}] {group}{self.members[self.me]}"


class ControlChannel(TcpTransport):
    """One member's view of all; its arguments are TcpTransport's."""

    name = "hierarchical"
    reporter_class = HierarchicalFailureReporter
    _awaited = -1  # for whom the others think that this member waits

    def agree(self, call: Call, x: Array | None, out: Array | None) -> TcpWork:
        """Post a call to all members, and none of its data; done when all have posted the same."""
        self.admit()
        check(call, self._reporter.where)
        nothing = Call("barrier", None, "none", 0, None, call.group)
        barrier = words(nothing, self._size, self._choices)
        return self._begin(call, barrier, self._post(call, x, out), (None, None), _nothing)

    @property
    def where(self) -> str:
        """Say whose messages these are."""
        return self._reporter.where

    def tell_awaited(self, candidates: list[int]) -> None:
        """Tell all others whom this member may wait for in a long wait; none when it is over."""
        idle = (member for member in candidates if self._member.awaited(member) < 0)
        chosen = next(idle, candidates[0]) if candidates else -1
        if chosen != self._awaited:
            self._awaited = chosen
            self._member.tell_awaited(chosen)

    def behind(self, candidates: list[int]) -> int:
        """Return who keeps this member waiting: who waits for nobody.

        Args:
            candidates: Whom this member may wait for; where these wait for others, those count.
        """
        seen = {self.index}
        for member in candidates:
            while member not in seen:
                seen.add(member)
                awaited = self._member.awaited(member)
                if awaited < 0:
                    return member
                member = awaited
        return candidates[0] if candidates else self.index

    def failure(self, agreed: TcpWork) -> AllreduceError:
        """Return why the communicator is dead: the cause first, then that it is.

        Args:
            agreed: The call that this member waits for.
        """
        return self._error(agreed.native, agreed.call)

    def propagate_failure(self, error: AllreduceError, agreed: TcpWork) -> None:
        """Tell all members why a smaller communicator has ended, unless they know by now.

        Args:
            error: Its error, which names a call of its own.
            agreed: The caller's call that it was a step of.
        """
        finding = error.finding or Finding("lost", str(error))
        differs = finding.fault == "mismatch"
        if finding.fault in ("lost", "left") and finding.call:
            finding = replace(finding, call=self.named(agreed))
        if finding.fault == "aborted":  # by another member than this one
            finding = replace(finding, fault="lost")
        if not self.await_verdict(_MISMATCH_SECONDS if differs else _VERDICT_SECONDS):
            self._member.abort(encode(finding))

    def named(self, agreed: TcpWork) -> str:
        """Say which call this is; also once all have posted it."""
        number = f"#{agreed.native.seq}"
        return f"call {number}" if agreed.call is None else f"{agreed.call} {number}"

    def await_verdict(self, seconds: float) -> bool:
        """Wait for the communicator's end; returns whether it has come in this time."""
        limit = time.monotonic() + seconds
        while self.verdict() is None and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)
        return self.verdict() is not None

    def missing(self, agreed: TcpWork, absent: list[int]) -> str:
        """Say who keeps a call waiting, what they did last and whether they live.

        Args:
            agreed: The call.
            absent: Whom it may wait for: all who have not posted it; once all have, those who
                must do their part now, or whom they wait for in their turn.
        """
        found = absent
        if agreed.native.done:
            found = list(dict.fromkeys(self.behind([member]) for member in absent or [self.index]))
        told = ((self.members[member], self._reporter.last_call(member)) for member in found)
        return "; ".join(f"{info} {last} ({info.state})" for info, last in told)

    def stopped(self) -> list[int]:
        """List the other members whose processes are known to be stopped."""
        return [m.index for m in self.members if m.index != self.index and m.stopped]

    def give_up(self, agreed: TcpWork, blamed: int, reason: str) -> None:
        """End the communicator because a call takes too long; `blamed` keeps it."""
        self._member.blame_timeout(blamed, agreed.native.key, reason)


def _nothing() -> None:
    pass
