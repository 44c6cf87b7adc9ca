"""A started call of the hierarchical transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allreduce.comm.core import progress
from allreduce.comm.core.transport import Work
from allreduce.comm.transports.hierarchical.runs import Run
from allreduce.comm.transports.tcp.transport import TcpWork

if TYPE_CHECKING:
    from allreduce.comm.transports.hierarchical.transport import HierarchicalTransport


class HierarchicalWork(Work):
    """A started call; its runs keep its arrays."""

    def __init__(
        self, transport: HierarchicalTransport, agreed: TcpWork, result: Callable[[], Any]
    ) -> None:
        self._transport, self.agreed, self._result = transport, agreed, result
        self.runs: list[Run] = []

    @property
    def complete(self) -> bool:
        """Whether all of it has been done."""
        return self.agreed.native.done and all(run.finished for run in self.runs)

    @property
    def settled(self) -> bool:
        return self.complete or self._transport.ended

    def done(self) -> bool:
        if not self.complete:
            self._transport.poll(self)
        return self.complete

    def look(self) -> bool:
        if not self.complete:
            progress.go_on()
        return self.complete

    def finish(self, timeout: float | None) -> Any:
        if not self.complete:
            self._transport.complete(self, timeout)
        self._transport.forget(self)
        return self._result()
