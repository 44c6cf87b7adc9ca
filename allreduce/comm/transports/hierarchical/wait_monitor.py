"""One long wait of a member: whom it is for, what the others and the user are told of it."""

from __future__ import annotations

from collections.abc import Callable

from allreduce.cluster.host.waiting import Awake
from allreduce.comm.failures.reporter import wait_text
from allreduce.comm.transports import native
from allreduce.comm.transports.hierarchical.control_channel import ControlChannel
from allreduce.comm.transports.tcp.transport import TcpWork
from allreduce.events import logger

# A wait this long is told to the others, and then whom it is for as often as that changes. They
# may wait for this member: who is to blame is at the end of such a chain.
_TELL_SECONDS = 1.0
_LOOK_SECONDS = 0.05


class WaitMonitor:
    """One wait that begins now.

    Args:
        control: All members.
        agreed: The call that is waited for, as the control has it.
        absent: Returns the members that may be waited for.
        seconds: How long the wait may last.
    """

    def __init__(
        self,
        control: ControlChannel,
        agreed: TcpWork,
        absent: Callable[[], list[int]],
        seconds: float,
    ) -> None:
        self._control, self._agreed, self._absent = control, agreed, absent
        self._seconds = seconds
        self._awake = Awake()
        self._look_at = min(_TELL_SECONDS, seconds / 2)
        self._warned = seconds <= native.WARN_SECONDS
        self._told = False

    @property
    def waited(self) -> float:
        """Seconds so far."""
        return self._awake.look()

    @property
    def left(self) -> float:
        """Seconds until the wait is given up."""
        return self._seconds - self.waited

    def look(self) -> None:
        """Tell what there is to tell by now."""
        waited = self.waited
        if waited < self._look_at:
            return
        self._look_at = waited + _LOOK_SECONDS
        self._told = True
        self._control.tell_awaited(self._keepers())
        if waited >= native.WARN_SECONDS and not self._warned:
            self._warned = True
            logger.warning(
                "%s has waited %.3g s in %s: %s",
                *(self._control.where, waited, self._control.named(self._agreed), self.missing()),
            )

    def _keepers(self) -> list[int]:
        """Return who is absent; once all have posted the call, those seen to be stopped, if any.

        Everybody has a part in it then, and these keep the others.
        """
        absent, stopped = self._absent(), self._control.stopped()
        if not self._agreed.native.done:
            return sorted(absent, key=lambda member: member not in stopped)
        return stopped or absent

    def blamed(self) -> int:
        """Return who keeps this member waiting; the own number where nobody does."""
        return self._control.behind(self._keepers())

    def missing(self) -> str:
        """Say who keeps this member waiting, what they did last and whether they live."""
        return self._control.missing(self._agreed, self._keepers())

    def reason(self) -> str:
        """Say why the wait is given up."""
        return wait_text(self._seconds, self.missing())

    def end(self) -> None:
        """Tell the others that the wait is over."""
        if self._told:
            self._control.tell_awaited([])
