"""Errors that say why a communicator died, with ranks, calls and a remedy."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from allreduce.cluster.host.machine import STOPPED
from allreduce.cluster.process.exit_hooks import note_failure
from allreduce.comm.calls.call import MESSAGES, Call
from allreduce.comm.calls.call_site import Note
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.failures.mismatch import Side, mismatch
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    Finding,
    MismatchError,
    PeerLostError,
    TimeoutError,
)

# Remedies for members that left too early.
ORDERED = "every rank must make the same calls"
PAIRED = "every send needs its recv, and every recv its send"

_REASON_BYTES = 247  # capacity of a member's state in shared memory; TCP takes 250
_CUT = "…"  # ends a cut text
_LONG_WORD = 30  # characters; a longer word is cut, not dropped

_MISSED = {"lost": "before it completed", "left": "while others were in"}  # precedes the call
_ERRORS: dict[str, type[AllreduceError]] = {"mismatch": MismatchError, "timeout": TimeoutError}

# The first character of an abort's reason is an index into this table: the fault, and whether an
# interrupt caused it. Reasons of native code lack this character.
_KINDS = [(fault, flag) for fault in ("aborted", "lost", *_ERRORS) for flag in (False, True)]
_GROUP = re.compile(r"[^/]+(/(split|group|local|across)\.\d+)+")


def group_text(name: str) -> str:
    """Return the prefix that names a group in messages; empty for the communicator of all ranks."""
    return f"{name}: " if _GROUP.fullmatch(name) else ""


def build_error(where: str, finding: Finding) -> AllreduceError:
    """Build one member's error for a communicator that has ended."""
    error = _ERRORS.get(finding.fault, PeerLostError)(f"{where}: {finding}")
    error.finding = finding
    if isinstance(error, PeerLostError):
        error.interrupted = finding.interrupted
    return error


def encode(finding: Finding) -> str:
    """Encode a finding as the reason of an abort; a long text is cut.

    Args:
        finding: For the fault "aborted" its text is the caller's reason, otherwise the whole
            message.
    """
    fault = "lost" if finding.fault == "left" else finding.fault
    head = chr(1 + _KINDS.index((fault, finding.interrupted)))
    return shortened(f"{head}{finding}")


def decode(reason: str) -> Finding:
    """Invert `encode`."""
    kind = ord(reason[0]) - 1 if reason else -1
    if not 0 <= kind < len(_KINDS):
        return Finding("aborted", reason)
    fault, interrupted = _KINDS[kind]
    return Finding(fault, reason[1:], interrupted=interrupted)


def dead(where: str, cause: str, finding: Finding | None) -> ClosedError:
    """Build the error for calls after the one that raised the cause, which had this finding."""
    error = ClosedError(
        f"{where}: the communicator is dead since: {cause}; close() it before you make a new one"
    )
    error.finding = finding
    return error


def shortened(reason: str) -> str:
    """Cut a reason to the size that members exchange, between words if possible."""
    if len(reason.encode(errors="replace")) <= _REASON_BYTES:
        return reason
    kept = reason.encode(errors="replace")[: _REASON_BYTES - len(_CUT.encode())]
    text = kept.decode(errors="ignore")
    words, _, part = text.rpartition(" ")
    return (words if words and len(part) <= _LONG_WORD else text) + _CUT


def wait_text(seconds: float, missing: str = "") -> str:
    """Encode the reason of a timeout for the other members.

    Args:
        missing: The awaited members, if the others cannot determine them.
    """
    return f"{seconds:.3g} {missing}"


def advice(waited_for: str) -> str:
    """Return the remedy for a timeout, given the description of the awaited members."""
    if STOPPED in waited_for:
        return "resume what is stopped: a longer timeout would not help"
    return "if it only needs longer, raise the timeout"


def _read_wait(reason: str) -> tuple[str, str]:
    seconds, _, missing = reason.partition(" ")
    return seconds, missing


class NativeRecords(Protocol):
    """A native communicator's records of calls and faults; their encoding of a call varies."""

    def culprit(self) -> tuple[str, int, int, int, str] | None: ...
    def missing(self, seq: int) -> list[int]: ...
    def posted_call(self, member: int, seq: int) -> Any | None: ...
    def last_call(self, member: int) -> tuple[int, Any] | None: ...


E = TypeVar("E", bound=NativeRecords)


class FailureReporter(ABC, Generic[E]):
    """Builds one member's error when its communicator has ended."""

    transport: ClassVar[str]

    def __init__(self, group: E, name: str, me: int, members: tuple[MemberInfo, ...]) -> None:
        self.group, self.name, self.me, self.members = group, name, me, members

    @property
    def where(self) -> str:
        return f"[{self.transport}] {group_text(self.name)}{self.members[self.me]}"

    @property
    def ended_in_known_call(self) -> bool:
        """Whether the communicator has ended, in a known call of the others."""
        found = self.group.culprit()
        return found is not None and self.call(found[2], found[3]) is not None

    def call(self, member: int, seq: int) -> Call | None:
        """Return the call that a member posted under a number, if its slot still has it."""
        words = self.group.posted_call(member, seq)
        return None if words is None else self.read(words)

    @abstractmethod
    def read(self, words: Any) -> Call:
        """Decode a native record of a call."""

    @abstractmethod
    def note(self, member: int, seq: int) -> Note:
        """Return a member's note on a call."""

    @abstractmethod
    def difference(self, low: int, high: int, seq: int) -> str:
        """Describe a difference that the calls' texts do not show, other than shapes."""

    def last_call(self, member: int) -> str:
        """Describe a member's last call."""
        found = self.group.last_call(member)
        if found is None:
            return "has made no call yet"
        seq, words = found
        return f"made its last call, {self.read(words)} #{seq}"

    def missing(self, seq: int) -> str:
        """Describe the members that call `seq` waits for: last call and process state."""
        return "; ".join(
            f"{self.members[m]} {self.last_call(m)} ({self.members[m].state})"
            for m in self.absent(seq)
        )

    def absent(self, seq: int) -> list[int]:
        """Return the members that call `seq` waits for, the most likely culprit first."""
        return self.group.missing(seq)

    def made(self, native: Any) -> Call | None:
        """Return this member's call behind `native`, if known."""
        return self.call(self.me, native.seq)

    def error(self, native: Any = None, own: Call | None = None) -> AllreduceError:
        """Build the error for the communicator's end.

        Args:
            native: The native work that this member waits for, or None.
            own: Its call, if the native side may have forgotten it.
        """
        found = self.group.culprit()
        assert found is not None, "only a dead communicator has an error"
        fault, member, observer, seq, reason = found
        note_failure(elsewhere=member != self.me and fault not in ("mismatch", "timeout"))
        blamed = self.members[member]
        absent = fault == "timeout" or self.call(self.me, seq) is None  # from the call
        current = self.named(observer if absent else self.me, seq)
        if fault == "mismatch":
            return self._mismatch(member, observer, seq)
        if fault in ("lost", "left"):
            own = own or (None if native is None else self.made(native))
            if own is not None:
                return self.peer_lost_error(fault, member, self.me, own, native.seq)
            message = self.call(observer, seq)
            if message is not None and message.collective in MESSAGES:
                return self.peer_lost_error(fault, member, observer, message)
            return self._missed(fault, member, current)
        if fault == "aborted":
            finding = decode(reason)
            if finding.fault == "aborted":
                text = f"{blamed} aborted the communicator: {finding}"
                finding = replace(finding, before=text)
            return build_error(self.where, finding)
        _, missing = _read_wait(reason)
        waited_for = missing or self.missing(seq) or f"{blamed} {self.last_call(member)}"
        return self.timeout_error(observer, current, reason, waited_for)

    def timeout_error(
        self, observer: int, current: str, reason: str, waited_for: str
    ) -> AllreduceError:
        """Build the error for a wait that took too long.

        Args:
            observer: The member that gave up.
            current: Its call.
            reason: The text of `wait_text`.
            waited_for: The missing members.
        """
        gave_up = "gave up" if observer == self.me else f"{self.members[observer]} gave up"
        after = f" after {_read_wait(reason)[0]} s: {waited_for}; {advice(waited_for)}"
        return build_error(self.where, Finding("timeout", f"{gave_up} ", current, after))

    def peer_lost_error(
        self, fault: str, member: int, observer: int, call: Call, seq: int = 0
    ) -> AllreduceError:
        """Build the error for a member that died or left during another's call.

        Args:
            fault: "lost" or "left".
            member: The member that died or left.
            observer: The member that made the call.
            call: The call.
            seq: Its number; messages have none.
        """
        if call.collective not in MESSAGES:
            return self._missed(fault, member, f"{call} #{seq}")
        when = f"while {self.members[observer]} was in"
        return self._departed(fault, member, when, str(call), PAIRED)

    def _missed(self, fault: str, member: int, current: str) -> AllreduceError:
        return self._departed(fault, member, _MISSED[fault], current, ORDERED)

    def _departed(
        self, fault: str, member: int, when: str, call: str, remedy: str
    ) -> AllreduceError:
        blamed = self.members[member]
        did, after = "left normally, by close() or the end of its program,", f"; {remedy}"
        if fault == "lost":
            did, after = "died", f", without notice: {blamed.lost}; the communicator is dead"
        before = f"{blamed} (process {blamed.pid}) {did} {when} "
        return build_error(self.where, Finding(fault, before, call, after))

    def named(self, member: int, seq: int) -> str:
        """Name the call that a member posted under a number, as far as it is known."""
        call = self.call(member, seq)
        if call is not None and call.collective in MESSAGES:  # messages have no number
            return str(call)
        return f"call #{seq}" if call is None else f"{call} #{seq}"

    def _mismatch(self, member: int, observer: int, seq: int) -> AllreduceError:
        low, high = sorted((member, observer))
        first, second = self.call(low, seq), self.call(high, seq)
        if first is None or second is None:  # its slot is not readable
            a, b = self.members[low], self.members[high]
            text = f"{a} and {b} made different calls #{seq}"
            return build_error(self.where, Finding("mismatch", text))
        message = {first.collective, second.collective} == set(MESSAGES)
        first_side, second_side = (
            Side(str(self.members[each]), call, self.note(each, seq), each == self.me, each)
            for each, call in ((low, first), (high, second))
        )
        what = "a message" if message else f"call #{seq}"
        hidden = "" if message else self.difference(low, high, seq)
        return mismatch(self.where, what, first_side, second_side, hidden)
