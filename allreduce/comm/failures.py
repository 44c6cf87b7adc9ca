"""Why a communicator died, as an error that names ranks, calls and what to do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from allreduce.comm.call import PATHS, Call, from_native
from allreduce.errors import AllreduceError, MismatchError, PeerLostError, TimeoutError


@dataclass(frozen=True)
class MemberInfo:
    """One member of a communicator: where it lives."""

    index: int
    rank: int
    pid: int
    replicated: bool  # whether processes have several members in this communicator

    def __str__(self) -> str:
        if self.replicated:
            return f"replica {self.index} (rank {self.rank})"
        return f"rank {self.rank}"

    @property
    def state(self) -> str:
        """Say whether its process lives."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return f"process {self.pid} is dead"
        except PermissionError:
            pass
        return f"process {self.pid} is alive"


class Evidence(Protocol):
    """What the native side knows of a communicator; how it writes a call down is its own."""

    def culprit(self) -> tuple[str, int, int, int, str] | None: ...
    def missing(self, seq: int) -> list[int]: ...
    def posted_call(self, member: int, seq: int) -> Any | None: ...
    def last_call(self, member: int) -> tuple[int, Any] | None: ...


@dataclass(frozen=True)
class Witness:
    """What one member can say about its communicator's end."""

    transport: ClassVar[str] = "shared"
    group: Evidence
    name: str
    me: int
    members: tuple[MemberInfo, ...]

    @property
    def where(self) -> str:
        return f"[{self.transport}] {self.members[self.me]}"

    def call(self, member: int, seq: int) -> Call | None:
        """Return the call that a member posted under a number, if its slot still tells."""
        words = self.group.posted_call(member, seq)
        return None if words is None else self.read(words)

    def read(self, words: Any) -> Call:
        """Read what the native side has written down of a call."""
        return from_native(words, self.name)

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
            for m in self.group.missing(seq)
        )

    def error(self, seconds: float) -> AllreduceError:
        """Build the error for what killed the communicator.

        Args:
            seconds: How long this member has waited, for timeouts.
        """
        found = self.group.culprit()
        assert found is not None, "only a dead communicator has an error"
        fault, member, witness, seq, reason = found
        blamed = self.members[member]
        current = self._named(seq)
        if fault == "mismatch":
            return self._mismatch(member, witness, seq)
        if fault == "lost":
            return PeerLostError(
                f"{self.where}: {blamed} (process {blamed.pid}) died before it completed "
                f"{current}, without a word: it was killed or it crashed; what started it tells "
                "its exit status; the communicator is dead"
            )
        if fault == "left":
            return PeerLostError(
                f"{self.where}: {blamed} (process {blamed.pid}) left normally, by close() or the "
                f"end of its program, while others were in {current}; every rank must make the "
                "same calls"
            )
        if fault == "aborted":
            return PeerLostError(f"{self.where}: {blamed} aborted the communicator: {reason}")
        after = f" after {seconds:.3g} s" if witness == self.me else ""
        return TimeoutError(
            f"{self.where}: {self.members[witness]} gave up {current}{after}: "
            f"{blamed} {self.last_call(member)} ({blamed.state}); if it only needs longer, raise "
            "the timeout"
        )

    def _named(self, seq: int) -> str:
        call = self.call(self.me, seq)
        return f"call #{seq}" if call is None else f"{call} #{seq}"

    def _mismatch(self, member: int, witness: int, seq: int) -> MismatchError:
        low, high = sorted((member, witness))
        a, b = self.members[low], self.members[high]
        first, second = self.call(low, seq), self.call(high, seq)
        if first is None or second is None:  # it cannot be reused: nobody has completed this call
            return MismatchError(f"{self.where}: {a} and {b} made different calls #{seq}")
        name = first.collective
        if {name, second.collective} == {"send", "recv"}:
            name = "a message"
        elif name != second.collective:
            text = f"call #{seq} is {first} on {a} but {second} on {b}; every rank must make the "
            return MismatchError(f"{self.where}: {text}same calls in the same order")
        difference = _difference(first, second) or self.difference(low, high, seq)
        return MismatchError(f"{self.where}: {name} #{seq} got {difference.format(a=a, b=b)}")

    def difference(self, low: int, high: int, seq: int) -> str:
        """Say what differs though the calls look alike: where their arrays lie."""
        paths = [self._path(member, seq) for member in (low, high)]
        if paths[0] == paths[1]:
            return "different arrays of comm.empty on {a} and {b}; pass the same one on every rank"
        words = ["memory of comm.empty" if path == "direct" else "ordinary" for path in paths]
        return (
            f"{words[0]} arrays on {{a}} but {words[1]} ones on {{b}}; input and output must be of "
            "the same kind on every rank"
        )

    def _path(self, member: int, seq: int) -> str:
        words = self.group.posted_call(member, seq)
        return PATHS[words[3]] if words is not None else "unknown"


def _difference(a: Call, b: Call) -> str:
    if a.dtype != b.dtype:
        return f"{a.dtype} on {{a}} but {b.dtype} on {{b}}; cast before the call"
    if a.op != b.op:
        return f"op={a.op!r} on {{a}} but op={b.op!r} on {{b}}"
    if a.collective == b.collective and a.root != b.root:
        return f"root={a.root} on {{a}} but root={b.root} on {{b}}"
    if a.receives is not None and b.receives is not None:
        return ""  # what each sends may differ
    if a.counts != b.counts:
        return f"counts={a.counts} on {{a}} but counts={b.counts} on {{b}}; they must be equal"
    if a.count != b.count:
        return f"{a.count} elements on {{a}} but {b.count} on {{b}}; shapes must be equal"
    return ""
