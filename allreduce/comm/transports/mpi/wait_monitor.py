"""Monitor a long wait over MPI: read the others' status, report one's own, warn the user."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field

from allreduce.cluster import LeaderLeftError
from allreduce.cluster.host.waiting import AwakeClock
from allreduce.comm.calls.call import ANY, Call
from allreduce.comm.failures.reporter import ORDERED, PAIRED, advice
from allreduce.comm.transports.mpi.status_board import Notice, StatusBoard
from allreduce.errors import AllreduceError, ClosedError, PeerLostError
from allreduce.events import logger

WARN_SECONDS = 10.0  # a wait this long is reported, once
_POLL_SECONDS = 0.25  # between looks at the board
_ANNOUNCE_SECONDS = 1.0  # a wait this long is reported to the others, for their messages
_ASK_SECONDS = 0.75  # before giving up, a member asks which others wait; they have answered by then
# Within this time, data sent before a member left must arrive, and a call that all had begun must
# complete.
_GRACE_SECONDS = 1.0


@dataclass
class WaitMonitor:
    """One long wait of one member.

    Args:
        board: The communicator's.
        where: "[mpi] rank 2", for messages.
        seq: The number of the collective call that is waited for; -1 of a send or receive.
        call: The call.
        seconds: How long the wait may last; 0 of one that only asks from time to time.
    """

    board: StatusBoard
    where: str
    seq: int
    call: Call
    seconds: float
    arrived: bool = False  # whether all members are known to have made the call
    last: tuple[int, str] | None = None  # number and text of the last that all are known to have
    _awake: AwakeClock = field(default_factory=AwakeClock)
    _looked: float = 0.0
    _announced: bool = False
    _asked: bool = False
    _warned: bool = False
    _left_seen: float | None = None
    _end_seen: float | None = None

    def __str__(self) -> str:
        return f"{self.call} #{self.seq}" if self.seq >= 0 else str(self.call)

    @property
    def waited(self) -> float:
        """Seconds since it began."""
        return self._awake.look()

    def check_if_due(self) -> AllreduceError | None:
        """Look around if it is time to."""
        return self.check() if self.waited - self._looked >= _POLL_SECONDS else None

    def check(self) -> AllreduceError | None:
        """Read the others' status; return why the communicator is dead.

        Warns the user once about missing members.
        """
        waited = self._looked = self.waited
        try:
            notice = self.board.latest_end()
            if notice is None or notice.kind == "left":
                notice = self._left(notice)
            elif self.arrived and self.seq < notice.calls and not self._overdue():
                notice = None  # it ended behind this call
            if notice is not None:
                member = self.board.world.called(notice.rank)
                remedy = ORDERED if self.seq >= 0 else PAIRED
                return notice.error(self.where, str(self), member, remedy)
            asks = waited >= self._ask_at
            if not self._announced and (
                waited >= _ANNOUNCE_SECONDS or asks or self.board.waits_requested
            ):
                self._announce()
            if asks and not self._asked:
                self._asked = True
                self.board.request_waits()
            if not self._warned and WARN_SECONDS <= waited < self.seconds:
                self._warned = True
                logger.warning(
                    "%s has waited %.3g s in %s: %s", self.where, waited, self, self._missing()
                )
        except (ClosedError, LeaderLeftError):  # there are no more reports, but MPI may go on
            return None
        except PeerLostError as error:
            if self.arrived and not self._overdue():
                return None
            return PeerLostError(f"{self.where}: {self}: {error}; the communicator is dead")
        return None

    def _overdue(self) -> bool:
        """Return whether the time is over in which a call that all had begun may complete."""
        self._end_seen = self._looked if self._end_seen is None else self._end_seen
        return self._looked - self._end_seen >= _GRACE_SECONDS

    @property
    def _ask_at(self) -> float:
        """Return the time after which to ask which others wait; infinity without a timeout."""
        return max(self.seconds - _ASK_SECONDS, self.seconds / 2) if self.seconds else math.inf

    def timeout_text(self) -> str:
        """Describe why the wait is given up, without naming this member."""
        try:
            missing = self._missing()
        except AllreduceError as error:  # of the store, whose leader is gone
            missing = str(error)
        return f"gave up {self} after {self.seconds:.3g} s: {missing}; {advice(missing)}"

    def end(self) -> None:
        """Tell the others that the wait is over."""
        if self._announced and self.seq < 0:  # of a collective, a later call's number shows it
            with contextlib.suppress(AllreduceError):  # no member can ask any more
                self.board.post_message_wait("")

    def _announce(self) -> None:
        self._announced = True
        if self.seq >= 0:
            self.board.post_wait(self.seq, self.call)
        elif self.seconds:  # one that only asks does not say when it has ended
            self.board.post_message_wait(f"{self.call.collective} for {self._peer}")

    @property
    def _peer(self) -> str:
        """Name the other side of a message."""
        assert self.call.root is not None, "a message has one"
        return "any rank" if self.call.root == ANY else self.board.world.called(self.call.root)

    def _left(self, notice: Notice | None) -> Notice | None:
        """Return a member that left without its part of the call; `notice` names one."""
        if self.seq >= 0:  # of earlier calls it has done its part
            return notice if notice is not None and self.seq >= notice.calls else None
        assert self.call.root is not None, "a message has a peer"
        gone = None if notice is None else self.board.departure(self.call.root)
        if gone is None:
            return None
        self._left_seen = self._looked if self._left_seen is None else self._left_seen
        return gone if self._looked - self._left_seen >= _GRACE_SECONDS else None

    def _missing(self) -> str:
        if self.arrived:
            stopped = self.board.stopped_text()
            return f"all ranks have made the call, but MPI has not completed it{stopped}"
        if self.seq >= 0:
            return self.board.missing(self.seq, self.last)
        return f"no matching call of {self._peer} has come{self.board.stopped_text()}"
