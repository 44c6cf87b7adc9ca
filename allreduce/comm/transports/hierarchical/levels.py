"""The smaller communicators of a hierarchical one: what is asked of them, whatever carries them.

Of a host's members there are two, before and after the exchange between hosts; of each lane one.
"every" has all members, where MPI carries between hosts: otherwise the ledger serves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from allreduce.comm.calls.array import Array
from allreduce.comm.calls.call import Call
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.calls.plan import Plan
from allreduce.errors import AllreduceError

if TYPE_CHECKING:
    from allreduce.comm.transports.hierarchical.runs import Run
    from allreduce.comm.transports.tcp.transport import TcpWork


class LevelWork(Protocol):
    """A started call of a level, as `base.Work`."""

    def done(self) -> bool: ...
    def wait(self) -> Any: ...

    def pause(self, seconds: float) -> bool:
        """Wait a moment; returns whether it is complete. That it is not is nobody's fault yet."""

    def absent(self) -> list[int]:
        """Say for which members of the level it may wait."""


class LevelTransport(Protocol):
    """One member of a level, as `base.Transport`."""

    @property
    def name(self) -> str: ...
    @property
    def any_thread(self) -> bool: ...
    def admit(self) -> None: ...
    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> LevelWork: ...
    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan: ...
    def abort(self, reason: str) -> None: ...
    def close(self, drain: bool) -> None: ...
    def close_inherited(self) -> None: ...

    def rename(self, members: tuple[MemberInfo, ...]) -> None:
        """Have messages name members as the larger communicator does that this one serves."""

    def payload_bytes(self) -> list[int] | None:
        """Return the bytes of data that have gone to each member; None where nobody counts them."""


class Level:
    """One smaller communicator, and the chains that have steps of it, in their order.

    Args:
        transport: The smaller communicator's.
        numbers: Its members' numbers in the larger one.
    """

    def __init__(self, transport: LevelTransport, numbers: tuple[int, ...]) -> None:
        self.transport, self.numbers = transport, numbers
        self.queue: deque[Run] = deque()


class LevelError(Exception):
    """A smaller communicator has failed.

    Args:
        error: What it has raised.
        agreed: The caller's call, as the ledger has it, in a step of which it has failed.
    """

    def __init__(self, error: AllreduceError, agreed: TcpWork) -> None:
        super().__init__(str(error))
        self.error, self.agreed = error, agreed


T = TypeVar("T")


def guarded(do: Callable[[], T], agreed: TcpWork) -> T:
    """Do something with a level, for the caller's call.

    Raises:
        LevelError: It has failed.
    """
    try:
        return do()
    except AllreduceError as error:
        raise LevelError(error, agreed) from error
