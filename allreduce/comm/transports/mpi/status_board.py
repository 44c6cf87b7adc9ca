"""Exchange the status of members through the world's store: waiting, left, or gave up.

A successful call uses none of this: a member reads it only during a long wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from allreduce.cluster import SilentError, World
from allreduce.cluster.host.machine import STOPPED
from allreduce.comm.calls.call import ANY, Call
from allreduce.comm.calls.call_site import Note
from allreduce.comm.failures.mismatch import Side, mismatch
from allreduce.comm.failures.reporter import ORDERED, build_error
from allreduce.errors import AllreduceError, Finding

_ANSWER_SECONDS = 1.0  # in which all members have noticed that a call differs
# The process that holds the store may be busy for long, or be stopped, and may itself be the
# awaited one. Then there is no news, and the wait goes on. Messages to the user, and those at the
# end, may take longer.
_POLL_SECONDS, _TELL_SECONDS = 0.45, 1.0


@lru_cache(maxsize=1024)
def signature(call: Call, shape: tuple[int, ...] = ()) -> int:
    """Hash the parts of a call that must agree on all members to 64 bits.

    Args:
        shape: Lengths of the array's axes that have to agree.
    """
    shared: tuple[Any, ...] = (
        *(call.collective, call.op, call.dtype, call.root, shape, call.call_text),
    )
    if call.collective == "all_to_all" and call.counts is not None:
        shared += ("counts",)  # each member has its own
    else:
        shared += (call.count, call.counts)
    return int.from_bytes(hashlib.blake2b(repr(shared).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Notice:
    """Something that ends a communicator, or will when it is needed again."""

    kind: str  # as a finding's fault
    rank: int
    calls: int  # how many collective calls the member had completed
    text: str
    interrupted: bool = False  # as a finding's

    def error(self, where: str, current: str, member: str, remedy: str) -> AllreduceError:
        """Build the error of a member that is in the call `current`; it names `member`."""
        finding = Finding(self.kind, self.text)
        if self.kind == "left":
            before = f"{member} left normally, by close() or the end of its program, while "
            finding = Finding("left", f"{before}others were in ", current, f"; {remedy}")
        elif self.kind == "aborted":
            text = f"{member} aborted the communicator: {self.text}"
            finding = Finding("aborted", text, interrupted=self.interrupted)
        return build_error(where, finding)


@dataclass(frozen=True)
class StatusBoard:
    """One member's access to the status of all members."""

    world: World
    name: str
    quiet: bool = False  # whether a communicator above reports the end to all members

    def post_end(self, notice: Notice) -> None:
        """Report it to all members; without effect if the world has already ended."""
        if self.quiet:
            return
        with contextlib.suppress(AllreduceError):  # then nobody can wait for us in this world
            text = json.dumps(asdict(notice))
            # A member that leaves must not hide a failure, nor members that left earlier.
            keys = ("left", f"left/{notice.rank}") if notice.kind == "left" else ("news",)
            for key in keys:
                self._post(key, text)
            self._get(keys[-1], _TELL_SECONDS)  # this process may be about to end

    def latest_end(self) -> Notice | None:
        """Return the last report; that a member left only if there is no failure.

        Raises:
            PeerLostError: A member died.
        """
        until = time.monotonic() + _POLL_SECONDS
        return self._notice("news") or self._notice("left", max(0.0, until - time.monotonic()))

    def departure(self, peer: int) -> Notice | None:
        """Return the notice of a message's peer that has left; of ANY, the last of all others'."""
        others = (rank for rank in range(self.world.size) if rank != self.world.rank)
        found = None
        for rank in others if peer == ANY else (peer,):
            found = self._notice(f"left/{rank}")
            if found is None:
                return None
        return found

    def post_wait(self, seq: int, call: Call) -> None:
        """Tell that this member waits in a call."""
        self._post(f"waits/{self.world.rank}", json.dumps([seq, str(call)]))

    def post_message_wait(self, text: str) -> None:
        """Report the send or recv in which this member waits, and its peer; "" ends the wait."""
        self._post(f"message/{self.world.rank}", text)

    def request_waits(self) -> None:
        """Ask all waiting members to report their waits, short ones too."""
        self._post("asked", "")

    @property
    def waits_requested(self) -> bool:
        """Whether a member has asked that."""
        return self._get("asked") is not None

    def missing(self, seq: int, last: tuple[int, str] | None) -> str:
        """Describe the members not known to wait in call `seq`: last call and process state.

        Args:
            last: The number of the last call that all members have made, and the call.
        """
        lines, until = [], time.monotonic() + _TELL_SECONDS

        def get(key: str) -> str | None:
            return self._get(key, max(0.0, until - time.monotonic()))

        for rank in range(self.world.size):
            text = get(f"waits/{rank}") if rank != self.world.rank else None
            number, call = json.loads(text) if text else (-1, "")
            if rank == self.world.rank or number >= seq:
                continue
            did = "is not known to have made a call"
            if last is not None:
                did = f"made its last call, {last[1]} #{last[0]}"
            if text and (last is None or number > last[0]):
                did = f"waits in call {call} #{number}"
            message = get(f"message/{rank}")
            did = f"{did}, and waits in a {message}" if message else did
            lines.append(f"{self.world.called(rank)} {did} ({self.world.state(rank)})")
        return (
            "; ".join(lines)
            or f"all ranks wait in it, but MPI has not completed it{self.stopped_text()}"
        )

    def stopped_text(self) -> str:
        """Describe the processes that are not just running."""
        called = self.world.called
        states = [(called(rank), self.world.state(rank)) for rank in range(self.world.size)]
        stopped = [f"{rank}: {state}" for rank, state in states if STOPPED in state]
        return f" ({'; '.join(stopped)})" if stopped else ""

    def post_call(self, seq: int, call: Call, note: bytes, mark: int) -> None:
        """Publish this member's version of call `seq`, on which members disagree."""
        content = {"call": asdict(call), "note": note.decode(errors="replace"), "mark": mark}
        with contextlib.suppress(AllreduceError):
            self._post(f"call/{seq}/{self.world.rank}", json.dumps(content))

    def mismatch_error(self, where: str, seq: int) -> AllreduceError:
        """Build the error for call `seq`, in which members disagree: the same on all of them."""
        versions = [self._version(f"call/{seq}/{rank}") for rank in range(self.world.size)]
        known = [rank for rank, each in enumerate(versions) if each is not None]
        odd = [rank for rank in known if versions[rank]["mark"] != versions[known[0]]["mark"]]
        if not odd:  # of members that can report no more, unless they did before
            with contextlib.suppress(AllreduceError):
                notice = self.latest_end()
                if notice is not None and notice.kind != "left":
                    current, member = f"call #{seq}", self.world.called(notice.rank)
                    return notice.error(where, current, member, ORDERED)
            return build_error(where, Finding("mismatch", f"ranks made different calls #{seq}"))
        first, second = (self._side(rank, versions[rank]) for rank in (known[0], odd[0]))
        return mismatch(where, f"call #{seq}", first, second)

    def _side(self, rank: int, version: Any) -> Side:
        fields: dict[str, Any] = version["call"]
        for name in ("counts", "receives"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        here = rank == self.world.rank
        note = Note.unpack(version["note"].encode())
        return Side(self.world.called(rank), Call(**fields), note, here, rank)

    def _version(self, key: str) -> Any:
        try:
            return json.loads(self.world.store.get(self._key(key), _ANSWER_SECONDS))
        except AllreduceError:  # a member that cannot report any more
            return None

    def _notice(self, key: str, patience: float = _POLL_SECONDS) -> Notice | None:
        text = self._get(key, patience)
        return None if text is None else Notice(**json.loads(text))

    def _get(self, key: str, patience: float = _POLL_SECONDS) -> str | None:
        with contextlib.suppress(SilentError):
            found = self.world.store.try_get(self._key(key), patience)
            return None if found is None else found.decode()
        return None

    def _post(self, key: str, text: str) -> None:
        self.world.store.post(self._key(key), text.encode())

    def _key(self, key: str) -> str:
        return f"mpi/{self.name}/{key}"
