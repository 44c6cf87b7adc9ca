"""Members of one process on logical devices of one GPU, among which NCCL has no part.

Each member brings its arrays on its own thread, and waits on the host for the others. The last to
come enqueues the call for all of them, on its stream and behind theirs; theirs then wait for it.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from allreduce.comm.core.transport import PreparedOnDevice
from allreduce.devices import COLLECTIVE, Device, Event
from allreduce.errors import AllreduceError, ClosedError, MismatchError, everywhere

_LOOK_SECONDS = 0.05  # between looks at a failure of another member

_numbers = itertools.count(1)
_meetings: weakref.WeakValueDictionary[int, Meeting] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class _Offer:
    """What one member brings to a call."""

    calls: Sequence[PreparedOnDevice]
    ready: Event


class Meeting:
    """Where the members of a communicator meet for each call.

    Args:
        size: The number of members.
        called: Names a member.
    """

    def __init__(self, size: int, called: Callable[[int], str]) -> None:
        self.number = next(_numbers)
        self.size, self._called = size, called
        self._changed = threading.Condition()
        self._offers: dict[int, _Offer] = {}
        self._round = 0
        self._outcome: Event | Exception | None = None
        _meetings[self.number] = self

    def meet(self, member: OneGpuMember, offer: _Offer) -> Event:
        """Bring a member's part of a call; returns the event of the call's end.

        Raises:
            MismatchError: Members made different calls; raised on all of them.
        """
        with self._changed:
            self._offers[member.rank] = offer
            if len(self._offers) == self.size:
                self._complete(member)
            else:
                self._wait(member, self._round)
            if isinstance(self._outcome, Exception):
                raise self._outcome
            assert self._outcome is not None, "the last member has set it"
            return self._outcome

    def _complete(self, member: OneGpuMember) -> None:
        offers = [self._offers[rank] for rank in range(self.size)]
        try:
            self._check(member.where, offers)
            self._outcome = member.enqueue_for_all(offers)
        except Exception as error:  # raised on every member's thread
            self._outcome = everywhere(error) if isinstance(error, AllreduceError) else error
        self._offers = {}
        self._round += 1
        self._changed.notify_all()

    def _wait(self, member: OneGpuMember, this_round: int) -> None:
        began = time.monotonic()
        try:
            while self._round == this_round:
                self._changed.wait(_LOOK_SECONDS)
                if self._round == this_round:
                    member.look(time.monotonic() - began)
        except BaseException:
            self._offers.pop(member.rank, None)
            raise

    def _check(self, where: str, offers: Sequence[_Offer]) -> None:
        texts = [[(each.call, each.factor) for each in offer.calls] for offer in offers]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                shown = [", ".join(str(call) for call, _ in each) for each in (texts[0], text)]
                raise MismatchError(
                    f"{where}: {self._called(0)} called {shown[0]}, but {self._called(rank)} "
                    f"called {shown[1]}; all members make the same calls in the same order"
                )


def meeting(number: int) -> Meeting:
    """Return a meeting that another member has made."""
    return _meetings[number]


class OneGpuMember:
    """A member; takes the place of an `NcclMember`.

    Args:
        device: Its logical device.
        rank: Its index.
        place: The members' meeting.
        where: A prefix for messages.
        look: Raises if the communicator has failed; is given the seconds of a wait.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        place: Meeting,
        where: str,
        look: Callable[[float], None],
    ) -> None:
        self.device, self.rank, self.where, self.look = device, rank, where, look
        self.stream: Any = device.own(COLLECTIVE)
        self.aborted = False
        self._meeting = place
        self._order = threading.RLock()

    def status(self) -> str:
        """Return "": it has no asynchronous errors of its own."""
        return ""

    def enqueue(self, calls: Sequence[PreparedOnDevice], *, ordered: bool = False) -> Event:
        """Enqueue collectives as one call; returns the event of its end.

        Args:
            calls: The checked calls.
            ordered: Whether the stream is behind the work that they depend on already.
        """
        if self.aborted:
            raise ClosedError(f"{self.where}: the communicator was aborted")
        with self._order:
            if not ordered:
                self.device.order_behind_all(self.stream)
            ready = self.device.event()
            self.stream.record(ready)
            self.stream.wait(self._meeting.meet(self, _Offer(calls, ready)))
            arrays = [array for each in calls for array in (each.x, each.out)]
            ended: Event = self.stream.hold(*arrays)
            return ended

    def enqueue_for_all(self, offers: Sequence[_Offer]) -> Event:
        """Enqueue all members' calls behind their streams; returns the event of the end."""
        for offer in offers:
            self.stream.wait(offer.ready)
        self.stream.launch(_run, offers)
        ended = self.device.event()
        self.stream.record(ended)
        return ended

    def abort(self) -> None:
        """Make no further call."""
        self.aborted = True

    def finalize(self) -> None:
        """Do nothing: complete calls need no member any more."""

    def close(self) -> None:
        """Leave; all its calls must be complete."""
        self.aborted = True


def _run(offers: Sequence[_Offer]) -> None:
    from allreduce.devices.cuda.kernels.exchange import exchange

    for same in zip(*(offer.calls for offer in offers), strict=True):
        first = same[0]
        exchange(first.call, first.factor, [each.x for each in same], [each.out for each in same])
