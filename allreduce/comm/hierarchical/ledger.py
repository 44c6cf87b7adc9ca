"""All members of a hierarchical communicator, connected each with each: who calls what, who lives.

Every call is posted here to all members, without data, before any output is written; messages and
all_to_all go here whole. Whatever happens in a smaller communicator becomes one fault here, so that
all members tell one story.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from allreduce import _native
from allreduce.comm.base import Array
from allreduce.comm.call import Call
from allreduce.comm.native import NativeTransport
from allreduce.comm.tcp.calls import check, words
from allreduce.comm.tcp.failures import TcpWitness
from allreduce.comm.tcp.transport import TcpTransport, TcpWork
from allreduce.errors import AllreduceError, MismatchError, PeerLostError, TimeoutError

_MARK = "\x01"  # before the reason of an abort that tells what happened in a smaller communicator
_ERRORS: dict[str, type[AllreduceError]] = {"mismatch": MismatchError, "timeout": TimeoutError}
_VERDICT_SECONDS = 0.3  # for this communicator to find out by itself; a mismatch takes its time:
_MISMATCH_SECONDS = 0.8  # others may have to post their calls first
_LOOK_SECONDS = 0.002
_SLICE_SECONDS = 0.001  # between looks at calls of smaller communicators, while there are any
_IDLE_SECONDS = 0.02


@dataclass(frozen=True)
class HierarchicalWitness(TcpWitness):
    """As a tcp transport's, with what came from smaller communicators."""

    transport: ClassVar[str] = "hierarchical"

    def error(self, seconds: float) -> AllreduceError:
        found = self.group.culprit()
        if found is not None and found[0] == "aborted" and found[4].startswith(_MARK):
            fault, _, text = found[4][len(_MARK) :].partition(" ")
            return _ERRORS.get(fault, PeerLostError)(f"{self.where}: {text}")
        return super().error(seconds)


class Ledger(TcpTransport):
    """One member's view of all; its arguments are TcpTransport's."""

    name = "hierarchical"
    witness_class = HierarchicalWitness
    drive: Callable[[], bool]  # does what can be done of all calls; says whether some wait
    _awaited: int | None = None  # for whom the others think that this member waits

    def agree(self, call: Call, x: Array | None, out: Array | None) -> TcpWork:
        """Post a call to all members, and none of its data; done when all have posted the same."""
        self._check_own()
        check(call, self._witness.where)
        nothing = Call("barrier", None, "none", 0, None, call.group)
        barrier = words(nothing, self._size, self._choices)
        return self._begin(barrier, self._told(call, x, out), None, None, _nothing)

    def tells(self, member: int) -> str:
        """Say what a member did last, and whether it lives."""
        info = self.members[member]
        return f"{info} {self._witness.last_call(member)} ({info.state})"

    @property
    def where(self) -> str:
        """Say whose messages these are."""
        return self._witness.where

    def tell_awaited(self, member: int | None) -> None:
        """Tell all others for whom this member waits in a long wait; None when it is over."""
        if member != self._awaited:
            self._awaited = member
            self._member.tell_awaited(-1 if member is None else member)

    def behind(self, member: int) -> int:
        """Return whom a member waits for, or whom that one does, and so on: who waits for none."""
        seen = {self.index}
        while member not in seen:
            seen.add(member)
            awaited = self._member.awaited(member)
            if awaited < 0 or awaited in seen:
                break
            member = awaited
        return member

    def failure(self, seconds: float = 0.0) -> AllreduceError:
        """Return why the communicator is dead: the cause first, then that it is."""
        return self._error(seconds)

    def condemn(self, level: NativeTransport[Any], text: str) -> None:
        """Tell all members what happened in a smaller communicator, unless they know by now.

        Args:
            level: The smaller communicator.
            text: What it says of its end.
        """
        fault, _ = level.verdict() or ("aborted", level.index)
        if not self.await_verdict(_MISMATCH_SECONDS if fault == "mismatch" else _VERDICT_SECONDS):
            self._member.abort(f"{_MARK}{fault} {text}")

    def await_verdict(self, seconds: float) -> bool:
        """Wait for the communicator's end; returns whether it has come in this time."""
        limit = time.monotonic() + seconds
        while self.verdict() is None and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)
        return self.verdict() is not None

    def give_up(self, agreed: TcpWork, blamed: int) -> None:
        """End the communicator because a call takes too long; `blamed` keeps it."""
        self._member.blame_timeout(blamed, agreed.native.key, self.tells(blamed))

    def _wait(self, native: _native.TcpWork, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while True:
            slice_seconds = _SLICE_SECONDS if self.drive() else _IDLE_SECONDS
            left = limit - time.monotonic()
            if super()._wait(native, max(0.0, min(left, slice_seconds))):
                return True
            if native.failed or left <= slice_seconds:
                return False


def _nothing() -> None:
    pass
