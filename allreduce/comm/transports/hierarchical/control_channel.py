"""The control channel of a hierarchical communicator: tcp connections among all members.

Every call is posted on it to all members, without data, before any output is written. It carries
messages, all_to_all, gather and scatter entirely. A failure of a level becomes one fault here, so
that all members report the same cause.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

from allreduce.comm.calls.call import Array, Call
from allreduce.comm.failures.reporter import encode, group_text
from allreduce.comm.transports.tcp.calls import words
from allreduce.comm.transports.tcp.failures import TcpFailureReporter
from allreduce.comm.transports.tcp.transport import TcpTransport, TcpWork
from allreduce.errors import AllreduceError, Finding

_VERDICT_SECONDS = 0.3  # for the channel to detect the fault itself; longer for a mismatch:
_MISMATCH_SECONDS = 0.8  # others may have to post their calls first
_POLL_SECONDS = 0.002


class HierarchicalFailureReporter(TcpFailureReporter):
    """Reports failures under the name of the hierarchical transport."""

    transport: ClassVar[str] = "hierarchical"

    @property
    def where(self) -> str:
        """The prefix with the communicator's name: this one is its part "all"."""
        group = group_text(self.name.rpartition("/")[0])
        return f"[{self.transport}] {group}{self.members[self.me]}"


class ControlChannel(TcpTransport):
    """One member of the control channel; the arguments are those of TcpTransport."""

    name = "hierarchical"
    reporter_class = HierarchicalFailureReporter
    _awaited = -1  # the announced member that this one waits for

    def agree(self, call: Call, x: Array | None, out: Array | None) -> TcpWork:
        """Post a call without its data; the work is done when all members have posted the same."""
        self.admit()
        nothing = Call("barrier", None, "none", 0, None, call.group)
        barrier = words(nothing, self._size, self._choices)
        return self._begin(call, barrier, self._post(call, x, out), (None, None), lambda: None)

    @property
    def where(self) -> str:
        """The prefix of messages."""
        return self._reporter.where

    def tell_awaited(self, candidates: list[int]) -> None:
        """Announce a member that this one waits for; none when the wait is over."""
        idle = (member for member in candidates if self._member.awaited(member) < 0)
        chosen = next(idle, candidates[0]) if candidates else -1
        if chosen != self._awaited:
            self._awaited = chosen
            self._member.tell_awaited(chosen)

    def culprit_among(self, candidates: list[int]) -> int:
        """Return the member that delays this one: one that waits for nobody itself.

        Args:
            candidates: The members that this one may wait for; their waits are followed.
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
        """Return the error of the dead communicator: first its cause, later `ClosedError`."""
        return self._error(agreed.native, agreed.call)

    def propagate_failure(self, error: AllreduceError, agreed: TcpWork) -> None:
        """End the communicator on all members after a level failed, unless it has ended already.

        Args:
            error: The level's error, which names the level's call.
            agreed: The caller's call with that step.
        """
        finding = error.finding or Finding("lost", str(error))
        differs = finding.fault == "mismatch"
        if finding.fault in ("lost", "left") and finding.call:
            finding = replace(finding, call=self.named(agreed))
        if finding.fault == "aborted":  # of a level, by another member
            finding = replace(finding, fault="lost")
        if not self.await_verdict(_MISMATCH_SECONDS if differs else _VERDICT_SECONDS):
            self._member.abort(encode(finding))

    def named(self, agreed: TcpWork) -> str:
        """Name a call for messages."""
        number = f"#{agreed.native.seq}"
        return f"call {number}" if agreed.call is None else f"{agreed.call} {number}"

    def await_verdict(self, seconds: float) -> bool:
        """Wait for the communicator's end; return whether it came in time."""
        limit = time.monotonic() + seconds
        while self.verdict() is None and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        return self.verdict() is not None

    def missing(self, agreed: TcpWork, absent: list[int]) -> str:
        """Describe the members that delay a call: last call and process state.

        Args:
            absent: The members that it may wait for: members that have not posted it, or, once all
                have, members whose step is due.
        """
        found = absent
        if agreed.native.done:
            found = list(
                dict.fromkeys(self.culprit_among([member]) for member in absent or [self.index])
            )
        described = ((self.members[member], self._reporter.last_call(member)) for member in found)
        return "; ".join(f"{info} {last} ({info.state})" for info, last in described)

    def stopped(self) -> list[int]:
        """Return the other members whose processes are known to be stopped."""
        return [m.index for m in self.members if m.index != self.index and m.stopped]

    def give_up(self, agreed: TcpWork, blamed: int, reason: str) -> None:
        """End the communicator after a timeout; `blamed` delayed the call."""
        self._member.blame_timeout(blamed, agreed.native.key, reason)
