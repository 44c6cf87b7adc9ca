"""Levels between hosts over MPI, for fabrics that only MPI supports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from allreduce.cluster import World
from allreduce.comm.calls.call import Array, Call
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.calls.plan import Plan
from allreduce.comm.transports.mpi.opener import open_mpi
from allreduce.comm.transports.mpi.request_queue import MpiWork
from allreduce.comm.transports.mpi.transport import MpiTransport

_NAP_SECONDS = 50e-6  # several polls per call


def open_mpi_levels(
    world: World, local_members: int, *, name: str, timeout: float
) -> list[MpiLevel]:
    """Open this process's member, as `open_tcp` does.

    Raises:
        UsageError, UnsupportedError: As for `open_mpi`.
    """
    opened = open_mpi(world, local_members, name=name, timeout=timeout, quiet=True)
    return [MpiLevel(each) for each in opened]


class MpiLevelWork:
    """A started call; the larger communicator monitors the wait."""

    def __init__(self, transport: MpiTransport, work: MpiWork, others: list[int]) -> None:
        self._transport, self._work, self._others = transport, work, others

    def done(self) -> bool:
        return self._work.complete or self._transport.poll(self._work)

    def wait(self) -> Any:
        return self._work.wait()

    def pause(self, seconds: float) -> bool:
        """Drive MPI and the calls of this host's members for `seconds`."""
        limit = time.monotonic() + seconds
        while not self.done() and time.monotonic() < limit:
            time.sleep(_NAP_SECONDS)
        return self._work.complete

    def absent(self) -> list[int]:
        """Return all others: MPI does not expose the awaited member."""
        return self._others


class MpiLevel:
    """One member of a level."""

    name = "mpi"

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport

    @property
    def any_thread(self) -> bool:
        return self._transport.any_thread

    def admit(self) -> None:
        self._transport.admit()

    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> MpiLevelWork:
        transport = self._transport
        others = [info.index for info in transport.members if info.index != transport.index]
        return MpiLevelWork(transport, transport.start(call, x, out, result), others)

    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan:
        return self._transport.plan(call, x, out)

    def abort(self, reason: str) -> None:
        self._transport.abort(reason)

    def close(self, drain: bool) -> None:
        self._transport.close(drain)

    def close_inherited(self) -> None:
        self._transport.close_inherited()

    def rename(self, members: tuple[MemberInfo, ...]) -> None:
        """Do nothing: the larger communicator names the members."""

    def payload_bytes(self) -> list[int] | None:
        return None
