"""Run the started calls of one communicator: agree on each in order, then hand it to MPI.

Callers must hold MPI's lock (`mpi_progress.entered`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from allreduce.comm.calls.call import Call, agreed_shape
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.core.work import LevelWork
from allreduce.comm.transports.mpi.calls import Collective
from allreduce.comm.transports.mpi.messages import Message
from allreduce.comm.transports.mpi.status_board import signature
from allreduce.comm.transports.mpi.wait_monitor import WaitMonitor

_NAP_SECONDS = 50e-6  # between polls of `pause`: several per call


class Driver(Protocol):
    """The transport of a started call, as far as the call uses it."""

    index: int

    @property
    def members(self) -> tuple[MemberInfo, ...]: ...
    @property
    def dead(self) -> bool: ...
    def ask(self, work: MpiWork) -> bool: ...
    def look(self, work: MpiWork) -> bool: ...
    def complete(self, work: MpiWork, timeout: float | None) -> None: ...


class MpiWork(LevelWork):
    """A started call of the mpi transport; keeps its arrays alive."""

    def __init__(
        self,
        transport: Driver,
        call: Call,
        task: Collective | Message,
        result: Callable[[], Any],
        note: bytes = b"",
    ) -> None:
        self.call, self.task, self.note = call, task, note
        self.seq = -1  # the number of a collective one
        self.met = self.complete = False  # `met`: whether all members have made the call
        self.agreement: Any = None  # the request that reduces these:
        self.mark = np.uint64(0)  # its signature
        self.words = np.zeros(3, np.uint64)  # signature, its complement, the task's flag
        self.monitor: WaitMonitor | None = None  # of one that asks whether it is done
        self._transport = transport
        self._result = result

    @property
    def agreed(self) -> bool:
        """Whether all members' signatures are equal: then the largest is the smallest."""
        return bool(self.words[0] == ~self.words[1])

    @property
    def settled(self) -> bool:
        return self.complete or self._transport.dead

    @property
    def unmet(self) -> bool:
        return isinstance(self.task, Message) and self.task.incoming and self.task.found is None

    def done(self) -> bool:
        return self.complete or self._transport.ask(self)

    def look(self) -> bool:
        return self.complete or self._transport.look(self)

    def pause(self, seconds: float) -> bool:
        """Drive MPI for `seconds`; as a level's work, whose wait the communicator monitors."""
        limit = time.monotonic() + seconds
        while not self.done() and time.monotonic() < limit:
            time.sleep(_NAP_SECONDS)
        return self.complete

    def absent(self) -> list[int]:
        """Return all other members by their places: MPI does not expose the awaited one."""
        places = range(len(self._transport.members))  # a level's members have others' indices
        return [place for place in places if place != self._transport.index]

    def finish(self, timeout: float | None) -> Any:
        if not self.complete:
            self._transport.complete(self, timeout)
        return self._result()

    def origin(self) -> tuple[int, int]:
        assert isinstance(self.task, Message), "only a recv is asked for its source"
        assert self.task.found is not None, "it is complete"
        return self.task.found


class RequestQueue:
    """The started calls and messages."""

    def __init__(self, mpi: Any, control: Any) -> None:
        self._mpi, self._control = mpi, control
        self._agreeing: deque[MpiWork] = deque()
        self._moving: deque[MpiWork] = deque()
        self._looking: list[MpiWork] = []  # receives that no message has been found for
        self._messages: list[MpiWork] = []
        self.started = self.completed = 0  # collective calls
        self.last: tuple[int, str] | None = None  # number and text of the last that all have made

    @property
    def works(self) -> list[MpiWork]:
        """All that are not complete."""
        return [*self._agreeing, *self._moving, *self._looking, *self._messages]

    @property
    def idle(self) -> bool:
        """Whether all are complete."""
        return not (self._agreeing or self._moving or self._looking or self._messages)

    @property
    def moving(self) -> bool:
        """Whether bytes are on their way, which advance with our polls only."""
        return bool(self._moving or self._messages)

    def begin(self, work: MpiWork, flag: bool) -> None:
        """Post the agreement on a collective call; it also tells if any member's `flag` is set."""
        assert isinstance(work.task, Collective)
        array = work.task.x if work.task.x is not None else work.task.out
        shape = () if array is None else agreed_shape(work.call, array.shape)
        work.seq = self.started
        work.mark = np.uint64(signature(work.call, shape))
        work.words[:] = work.mark, ~work.mark, flag
        buffer = [work.words, work.words.size, self._mpi.UINT64_T]
        self._agreeing.append(work)  # first: an interrupt must not free MPI's memory
        work.agreement = self._control.Iallreduce(self._mpi.IN_PLACE, buffer, self._mpi.MAX)
        self.started += 1

    def begin_message(self, work: MpiWork) -> None:
        """Send, or look for a message to receive."""
        assert isinstance(work.task, Message)
        if work.task.incoming:
            self._looking.append(work)
        else:
            self._messages.append(work)
            work.task.send()

    def advance(self) -> MpiWork | None:
        """Advance all calls; return a work on which the members disagree.

        Calls that all members made before it are then complete.

        Raises:
            MismatchError: A message differs from the one that its receiver expects.
        """
        self._complete()
        while self._agreeing and self._agreeing[0].agreement.Test():
            work = self._agreeing[0]
            if not work.agreed:
                if self._moving:
                    break
                return work
            work.met = True
            if not self._may_post:
                break
            assert isinstance(work.task, Collective)
            self._moving.append(work)  # an interrupt must not have it posted a second time
            self._agreeing.popleft()
            work.task.post()
            self.last = work.seq, str(work.call)
            self._complete()
        self._advance_messages()
        return None

    @property
    def _may_post(self) -> bool:
        """Whether MPI may be asked for another call: it takes their parts in one order."""
        task = self._moving[-1].task if self._moving else None
        return task is None or (isinstance(task, Collective) and task.posted)

    def _complete(self) -> None:
        while self._moving and self._moving[0].task.complete():
            self._moving.popleft().complete = True
            self.completed += 1

    def _advance_messages(self) -> None:
        looking: list[Message] = []
        for work in list(self._looking):
            assert isinstance(work.task, Message)
            if work.task.look(looking):
                self._looking.remove(work)
                self._messages.append(work)
            else:
                looking.append(work.task)
        for work in self._messages:
            work.complete = work.task.complete()
        self._messages = [work for work in self._messages if not work.complete]
