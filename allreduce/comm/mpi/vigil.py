"""A long wait over MPI: what the one who waits hears of the others, and tells them and the user."""

from __future__ import annotations

from dataclasses import dataclass

from allreduce.cluster import LeaderLeftError
from allreduce.comm.call import Call
from allreduce.comm.mpi.news import News, Notice
from allreduce.errors import AllreduceError, ClosedError, PeerLostError
from allreduce.events import logger

WARN_SECONDS = 10.0  # a wait this long is reported, once
_ANNOUNCE_SECONDS = 1.0  # a wait this long is told to the others, for their messages
_GRACE_SECONDS = 1.0  # in which what a member sent before it left must have come


@dataclass
class Vigil:
    """One long wait of one member: what it hears of the others, and tells them and the user.

    Args:
        news: The communicator's.
        where: "[mpi] rank 2", for messages.
        seq: The number of the collective call that is waited for; -1 of a send or receive.
        call: The call.
        seconds: How long the wait may last.
    """

    news: News
    where: str
    seq: int
    call: Call
    seconds: float
    arrived: bool = False  # whether all members are known to have made the call
    last: str = ""  # the last call that all members are known to have made, with its number
    _waited: float = 0.0
    _announced: bool = False
    _warned: bool = False
    _left_seen: float | None = None

    def __str__(self) -> str:
        return f"{self.call} #{self.seq}" if self.seq >= 0 else str(self.call)

    def look(self, waited: float) -> AllreduceError | None:
        """Look around, `waited` seconds from the beginning; returns why the communicator is dead.

        Warns the user, once, of those that are missing.
        """
        self._waited = waited
        try:
            notice = self.news.hear()
            if notice is not None and self._concerns(notice):
                return notice.error(self.where, str(self), self.news.world.called(notice.rank))
            if not self._announced and waited >= _ANNOUNCE_SECONDS and self.seq >= 0:
                self.news.wait_in(self.seq, self.call)
                self._announced = True
            if not self._warned and WARN_SECONDS <= waited < self.seconds:
                self._warned = True
                logger.warning(
                    "%s has waited %.3g s in %s: %s", self.where, waited, self, self._missing()
                )
        except (ClosedError, LeaderLeftError):  # nobody tells anything any more, but MPI may go on
            return None
        except PeerLostError as error:
            return PeerLostError(f"{self.where}: {self}: {error}; the communicator is dead")
        return None

    def surrender(self) -> str:
        """Say why the wait is given up."""
        try:
            missing = self._missing()
        except AllreduceError as error:  # of the store, whose leader is gone
            missing = str(error)
        return (
            f"{self.news.world.called()} gave up {self} after {self.seconds:.3g} s: {missing}; "
            "if it only needs longer, raise the timeout"
        )

    def _concerns(self, notice: Notice) -> bool:
        if notice.kind != "left":
            return True
        if self.seq >= 0:
            return self.seq >= notice.calls  # of earlier ones it has done its part
        if self.call.root != notice.rank:
            return False
        self._left_seen = self._waited if self._left_seen is None else self._left_seen
        return self._waited - self._left_seen >= _GRACE_SECONDS

    def _missing(self) -> str:
        if self.arrived:
            return f"all ranks have made the call, but MPI has not completed it{self.news.odd()}"
        if self.seq >= 0:
            return self.news.missing(self.seq, self.last)
        peer = "any rank" if self.call.root == -1 else self.news.world.called(self.call.root)
        return f"no matching call of {peer} has come{self.news.odd()}"
