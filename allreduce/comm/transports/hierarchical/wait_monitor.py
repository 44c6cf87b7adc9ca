"""Monitor a long wait: announce the awaited member and warn the user."""

from __future__ import annotations

from collections.abc import Callable

from allreduce.cluster.host.waiting import AwakeClock
from allreduce.comm.failures.reporter import wait_text
from allreduce.comm.transports import native
from allreduce.comm.transports.hierarchical.control_channel import ControlChannel
from allreduce.comm.transports.tcp.transport import TcpWork
from allreduce.events import logger

# A longer wait is announced to the others with the awaited member. They may wait for this member,
# and the culprit is at the end of the chain of waits.
_ANNOUNCE_SECONDS = 1.0
_POLL_SECONDS = 0.05


class WaitMonitor:
    """One wait, which begins now."""

    def __init__(
        self,
        control: ControlChannel,
        agreed: TcpWork,
        absent: Callable[[], list[int]],
        seconds: float,
    ) -> None:
        self._control, self._agreed, self._absent = control, agreed, absent
        self._seconds = seconds
        self._awake = AwakeClock()
        self._look_at = min(_ANNOUNCE_SECONDS, seconds / 2)
        self._warned = seconds <= native.WARN_SECONDS
        self._announced = False

    @property
    def waited(self) -> float:
        """Seconds so far."""
        return self._awake.look()

    @property
    def left(self) -> float:
        """Seconds until the wait is given up."""
        return self._seconds - self.waited

    def check(self) -> None:
        """Announce and warn if it is time to."""
        waited = self.waited
        if waited < self._look_at:
            return
        self._look_at = waited + _POLL_SECONDS
        self._announced = True
        self._control.tell_awaited(self._delaying())
        if waited >= native.WARN_SECONDS and not self._warned:
            self._warned = True
            logger.warning(
                "%s has waited %.3g s in %s: %s",
                *(self._control.where, waited, self._control.named(self._agreed), self.missing()),
            )

    def _delaying(self) -> list[int]:
        """Return the absent members; once all have posted the call, the stopped ones, if any.

        In that case every member is in the call, and stopped members delay the others.
        """
        absent, stopped = self._absent(), self._control.stopped()
        if not self._agreed.native.done:
            return sorted(absent, key=lambda member: member not in stopped)
        return stopped or absent

    def blamed(self) -> int:
        """Return the member that delays this one; the own index if none does."""
        return self._control.culprit_among(self._delaying())

    def missing(self) -> str:
        """Describe the members that delay this one: last call and process state."""
        return self._control.missing(self._agreed, self._delaying())

    def reason(self) -> str:
        """Return the reason of the timeout."""
        return wait_text(self._seconds, self.missing())

    def end(self) -> None:
        """Announce that the wait is over."""
        if self._announced:
            self._control.tell_awaited([])
