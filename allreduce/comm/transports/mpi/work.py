"""A started call of the mpi transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from allreduce.comm.calls.call import Call
from allreduce.comm.core.transport import Work
from allreduce.comm.transports.mpi.calls import Collective
from allreduce.comm.transports.mpi.messages import Message
from allreduce.comm.transports.mpi.wait_monitor import Vigil

if TYPE_CHECKING:
    from allreduce.comm.transports.mpi.transport import MpiTransport


class MpiWork(Work):
    """A started call of the mpi transport; keeps its arrays alive."""

    def __init__(
        self,
        transport: MpiTransport,
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
        self.vigil: Vigil | None = None  # of one that asks whether it is done
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

    def finish(self, timeout: float | None) -> Any:
        if not self.complete:
            self._transport.complete(self, timeout)
        return self._result()

    def origin(self) -> tuple[int, int]:
        assert isinstance(self.task, Message), "only a recv is asked for its source"
        assert self.task.found is not None, "it is complete"
        return self.task.found
