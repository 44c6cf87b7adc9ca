"""Why a communicator died, as an error that names ranks, calls and what to do."""

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

# What members that left too early had to do.
ORDERED = "every rank must make the same calls"
PAIRED = "every send needs its recv, and every recv its send"

_REASON_BYTES = 247  # for which the state of a member in shared memory has room; TCP takes 250
_CUT = "…"  # ends what is cut
_LONG_WORD = 30  # characters; of a longer one the beginning says something

_MISSED = {"lost": "before it completed", "left": "while others were in"}  # goes before the call
_ERRORS: dict[str, type[AllreduceError]] = {"mismatch": MismatchError, "timeout": TimeoutError}

# The first character of an abort's reason is an index into this table: the fault, and whether an
# interrupt caused it. Reasons that native code gives by itself have no such character.
_KINDS = [(fault, flag) for fault in ("aborted", "lost", *_ERRORS) for flag in (False, True)]
_GROUP = re.compile(r"[^/]+(/(split|group|local|across)\.\d+)+")


def group_text(name: str) -> str:
    """Say which group a message is about: that of all ranks goes without saying."""
    return f"{name}: " if _GROUP.fullmatch(name) else ""


def build_error(where: str, finding: Finding) -> AllreduceError:
    """Build one member's error for what has ended its communicator."""
    error = _ERRORS.get(finding.fault, PeerLostError)(f"{where}: {finding}")
    error.finding = finding
    if isinstance(error, PeerLostError):
        error.interrupted = finding.interrupted
    return error


def encode(finding: Finding) -> str:
    """Return the reason of an abort that tells a finding; a long text is cut.

    Args:
        finding: Its text is the caller's reason if its fault is "aborted". Otherwise it is the
            whole message.
    """
    fault = "lost" if finding.fault == "left" else finding.fault
    head = chr(1 + _KINDS.index((fault, finding.interrupted)))
    return shortened(f"{head}{finding}")


def decode(reason: str) -> Finding:
    """Return what `encode` was given."""
    kind = ord(reason[0]) - 1 if reason else -1
    if not 0 <= kind < len(_KINDS):
        return Finding("aborted", reason)
    fault, interrupted = _KINDS[kind]
    return Finding(fault, reason[1:], interrupted=interrupted)


def dead(where: str, cause: object) -> ClosedError:
    """Build the error for each call after the one that has heard why its communicator died."""
    return ClosedError(
        f"{where}: the communicator is dead since: {cause}; close() it before you make a new one"
    )


def shortened(reason: str) -> str:
    """Cut a reason to what members are told at once, between words where one ends near there."""
    if len(reason.encode(errors="replace")) <= _REASON_BYTES:
        return reason
    kept = reason.encode(errors="replace")[: _REASON_BYTES - len(_CUT.encode())]
    text = kept.decode(errors="ignore")
    words, _, part = text.rpartition(" ")
    return (words if words and len(part) <= _LONG_WORD else text) + _CUT


def wait_text(seconds: float, missing: str = "") -> str:
    """Return the reason of a timeout, as the one who gives up tells it to the others.

    Args:
        seconds: How long it has waited.
        missing: For whom, where the others cannot see that by themselves.
    """
    return f"{seconds:.3g} {missing}"


def advice(waited_for: str) -> str:
    """Say what to do after a wait that was too long, by what is told of those it was for."""
    if STOPPED in waited_for:
        return "resume what is stopped: a longer timeout would not help"
    return "if it only needs longer, raise the timeout"


def _read_wait(reason: str) -> tuple[str, str]:
    seconds, _, missing = reason.partition(" ")
    return seconds, missing


class Evidence(Protocol):
    """What the native side knows of a communicator; how it writes a call down is its own."""

    def culprit(self) -> tuple[str, int, int, int, str] | None: ...
    def missing(self, seq: int) -> list[int]: ...
    def posted_call(self, member: int, seq: int) -> Any | None: ...
    def last_call(self, member: int) -> tuple[int, Any] | None: ...


E = TypeVar("E", bound=Evidence)


class FailureReporter(ABC, Generic[E]):
    """What one member can say about its communicator's end.

    Args:
        group: What the native side knows.
        name: The communicator's.
        me: The member.
        members: All of them, as messages are to name them.
    """

    transport: ClassVar[str]

    def __init__(self, group: E, name: str, me: int, members: tuple[MemberInfo, ...]) -> None:
        self.group, self.name, self.me, self.members = group, name, me, members

    @property
    def where(self) -> str:
        return f"[{self.transport}] {group_text(self.name)}{self.members[self.me]}"

    @property
    def heard(self) -> bool:
        """Whether the communicator has ended, and in which call of the others is known."""
        found = self.group.culprit()
        return found is not None and self.call(found[2], found[3]) is not None

    def call(self, member: int, seq: int) -> Call | None:
        """Return the call that a member posted under a number, if its slot still tells."""
        words = self.group.posted_call(member, seq)
        return None if words is None else self.read(words)

    @abstractmethod
    def read(self, words: Any) -> Call:
        """Read what the native side has written down of a call."""

    @abstractmethod
    def note(self, member: int, seq: int) -> Note:
        """Return what a member tells of a call besides."""

    @abstractmethod
    def difference(self, low: int, high: int, seq: int) -> str:
        """Say what differs though two calls look alike, if it is not the arrays' shapes."""

    def last_call(self, member: int) -> str:
        """Say what a member did last."""
        found = self.group.last_call(member)
        if found is None:
            return "has made no call yet"
        seq, words = found
        return f"made its last call, {self.read(words)} #{seq}"

    def missing(self, seq: int) -> str:
        """Say for whom call `seq` waits, what they did last and whether they live."""
        return "; ".join(
            f"{self.members[m]} {self.last_call(m)} ({self.members[m].state})"
            for m in self.absent(seq)
        )

    def absent(self, seq: int) -> list[int]:
        """List for whom call `seq` waits, whoever is most to blame first."""
        return self.group.missing(seq)

    def made(self, native: Any) -> Call | None:
        """Return the call of this member's that is carried out as `native`, if that is known."""
        return self.call(self.me, native.seq)

    def error(self, native: Any = None, own: Call | None = None) -> AllreduceError:
        """Build the error for what killed the communicator.

        Args:
            native: What this member waits for; None if for nothing.
            own: The call of it, where the native side may have forgotten it.
        """
        found = self.group.culprit()
        assert found is not None, "only a dead communicator has an error"
        fault, member, witness, seq, reason = found
        note_failure(elsewhere=member != self.me and fault not in ("mismatch", "timeout"))
        blamed = self.members[member]
        absent = fault == "timeout" or self.call(self.me, seq) is None  # from the call
        current = self.named(witness if absent else self.me, seq)
        if fault == "mismatch":
            return self._mismatch(member, witness, seq)
        if fault in ("lost", "left"):
            own = own or (None if native is None else self.made(native))
            if own is not None:
                return self.peer_lost_error(fault, member, self.me, own, native.seq)
            message = self.call(witness, seq)
            if message is not None and message.collective in MESSAGES:
                return self.peer_lost_error(fault, member, witness, message)
            return self._missed(fault, member, current)
        if fault == "aborted":
            finding = decode(reason)
            if finding.fault == "aborted":
                text = f"{blamed} aborted the communicator: {finding}"
                finding = replace(finding, before=text)
            return build_error(self.where, finding)
        _, told = _read_wait(reason)
        waited_for = told or self.missing(seq) or f"{blamed} {self.last_call(member)}"
        return self.given_up(witness, current, reason, waited_for)

    def given_up(self, witness: int, current: str, reason: str, waited_for: str) -> AllreduceError:
        """Build the error for a wait of the witness that took too long.

        Args:
            witness: Who gave up.
            current: In which call.
            reason: As `wait_text` made it.
            waited_for: Who was missing.
        """
        gave_up = "gave up" if witness == self.me else f"{self.members[witness]} gave up"
        after = f" after {_read_wait(reason)[0]} s: {waited_for}; {advice(waited_for)}"
        return build_error(self.where, Finding("timeout", f"{gave_up} ", current, after))

    def peer_lost_error(
        self, fault: str, member: int, witness: int, call: Call, seq: int = 0
    ) -> AllreduceError:
        """Build the error for a call of the witness's in which another died or left.

        Args:
            fault: "lost" or "left".
            member: Who did.
            witness: Whose call it is.
            call: The call.
            seq: Its number; messages have none.
        """
        if call.collective not in MESSAGES:
            return self._missed(fault, member, f"{call} #{seq}")
        when = f"while {self.members[witness]} was in"
        return self._departed(fault, member, when, str(call), PAIRED)

    def _missed(self, fault: str, member: int, current: str) -> AllreduceError:
        return self._departed(fault, member, _MISSED[fault], current, ORDERED)

    def _departed(
        self, fault: str, member: int, when: str, call: str, remedy: str
    ) -> AllreduceError:
        blamed = self.members[member]
        did, after = "left normally, by close() or the end of its program,", f"; {remedy}"
        if fault == "lost":
            did, after = "died", f", without a word: {blamed.lost}; the communicator is dead"
        before = f"{blamed} (process {blamed.pid}) {did} {when} "
        return build_error(self.where, Finding(fault, before, call, after))

    def named(self, member: int, seq: int) -> str:
        """Say which call a member has posted under a number, as far as that is still known."""
        call = self.call(member, seq)
        if call is not None and call.collective in MESSAGES:  # they have no place in the order
            return str(call)
        return f"call #{seq}" if call is None else f"{call} #{seq}"

    def _mismatch(self, member: int, witness: int, seq: int) -> AllreduceError:
        low, high = sorted((member, witness))
        first, second = self.call(low, seq), self.call(high, seq)
        if first is None or second is None:  # it cannot be reused: nobody has completed this call
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
