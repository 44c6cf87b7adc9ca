"""The interfaces of transports."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm.calls.call import Array, Call
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.calls.plan import Plan
from allreduce.comm.core.work import LevelWork, Work
from allreduce.devices import Device
from allreduce.errors import AllreduceError, Finding, is_interrupt


class Transport(ABC):
    """One member's connection to the others. Calls take contiguous arrays that are checked."""

    name: str  # as in `transport=` and `ALLREDUCE_TRANSPORT`
    index: int  # this member
    any_thread = True  # whether every thread may call it

    @property
    def on_host(self) -> Transport:
        """The transport of arrays in the host's memory: this one, or the one beside it."""
        return self

    @property
    @abstractmethod
    def members(self) -> tuple[MemberInfo, ...]:
        """All members."""

    @abstractmethod
    def admit(self) -> None:
        """Raise if this process or thread must not use the transport; touches nothing.

        Raises:
            UsageError: This is a forked child, or MPI accepts no calls of this thread.
        """

    @abstractmethod
    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> Work:
        """Start a call; its `wait` returns `result()`."""

    def bind(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> Callable[[], Work]:
        """Return a function that starts this call; it may run again after each completion."""
        return functools.partial(self.start, call, x, out, result)

    @abstractmethod
    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan:
        """Return the plan of `start` with these arguments."""

    def called(self, member: int) -> str:
        """Return a member's name for messages: "rank 7 (member 2)"."""
        return str(self.members[member])

    @property
    @abstractmethod
    def dead(self) -> bool:
        """Whether an error has ended the communicator."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise if the communicator has ended: first the cause, later `ClosedError`."""

    def cause(self) -> AllreduceError | None:
        """Return why the communicator is dead; a use still raises that, and not `ClosedError`."""
        try:
            self.check_alive()
        except AllreduceError as error:
            return error
        return None

    @abstractmethod
    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate symmetric memory: one part per member, mapped by all; a collective call."""

    @abstractmethod
    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        """Make the communicator dead on all members; started calls touch no array any more.

        Args:
            reason: The cause, for the others' messages.
            interrupted: Whether an interrupt such as Ctrl-C is the cause.
        """

    def end(self, finding: Finding) -> None:
        """As `abort`, for a fault that was found outside; all members raise the finding's error."""
        self.abort(str(finding), interrupted=finding.interrupted)

    @abstractmethod
    def close(self, drain: bool) -> None:
        """Leave with notice; with `drain`, first complete all started calls."""

    @abstractmethod
    def close_inherited(self) -> None:
        """In a forked child, close the inherited sockets whose end means the parent's end.

        Also replace locks that other threads of the parent may have held.
        """

    @contextlib.contextmanager
    def uninterrupted(self, doing: str = "a wait") -> Iterator[None]:
        """Make the communicator dead if a signal handler raises in the block."""
        try:
            yield
        except AllreduceError:
            raise
        except BaseException as error:
            self.abort_interrupted(doing, error)
            raise

    def abort_interrupted(self, doing: str, error: BaseException) -> None:
        """Abort because a signal handler raised."""
        reason = f"{doing} was interrupted by {type(error).__name__}"
        self.abort(reason, interrupted=is_interrupt(error))


class LevelTransport(Transport):
    """A transport that can carry calls of a larger communicator.

    Attributes:
        wait_priority: Of several levels' calls, a member waits in one of the highest: 0 if calls
            advance by themselves, 1 if waits drive them, 2 if they drive the host's calls, too.
        closes_together: Whether all members close it together.
    """

    wait_priority: int
    closes_together: bool

    @abstractmethod
    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> LevelWork: ...

    @abstractmethod
    def rename(self, members: tuple[MemberInfo, ...]) -> None:
        """Use the members' names of the larger communicator that this one serves."""


@runtime_checkable
class FastTransport(Protocol):
    """A transport whose native member takes synchronous calls of plain arrays."""

    @property
    def native(self) -> _native.Member:
        """The native member."""

    def finish_fast(self, work: object, x: Array | None) -> None:
        """Complete the native work of a fast call with input `x`, or raise its error."""


@runtime_checkable
class MappedTransport(Protocol):
    """A transport whose members can read and write each other's symmetric memory."""

    def bind_update(
        self, call: Call, gradients: Array, values: Array, update: _native.Update, keep: object
    ) -> Callable[[], Work]:
        """Return a function that starts an update (fused_update.py), one at a time."""

    def part_of(self, array: Array, member: int) -> NDArray[np.uint8]:
        """Return a member's bytes at the place of an array of symmetric memory."""


@dataclass(frozen=True)
class PreparedOnDevice:
    """A checked call of a device's arrays.

    Attributes:
        call: The call.
        device: The device of the arrays.
        x: The input, contiguous; None on members that only receive.
        out: The output; None on members that get no result.
        factor: The number that a sum or mean is multiplied by.
        result: Returns the caller's result.
    """

    call: Call
    device: Device
    x: Any
    out: Any
    factor: float
    result: Callable[[], Any]


@runtime_checkable
class DeviceTransport(Protocol):
    """A transport that also carries arrays on devices with memory of their own."""

    def enqueues_on(self, device: Device) -> bool:
        """Return whether it carries a device's arrays, on the device's collective stream."""

    def start_on_device(self, ready: PreparedOnDevice, *, ordered: bool = False) -> Work:
        """Enqueue a call on its device.

        Args:
            ready: The checked call.
            ordered: Whether the device's collective stream waits for the work that the call depends
                on already; otherwise it is put behind all that the device was given before.
        """

    def start_list_on_device(
        self, calls: Sequence[PreparedOnDevice], result: Callable[[], Any]
    ) -> Work:
        """Enqueue several calls as one; its `wait` returns `result()`."""

    def check_carries(self, where: str, call: Call) -> None:
        """Refuse a call whose dtype or operator it does not carry on devices."""

    def drain(self) -> None:
        """Wait until the calls on devices have ended, or the communicator has failed.

        Then begin to leave, without `close`'s wait for other members; no call may follow.
        """


_ALIGNMENT = 64  # bytes: a cache line


def aligned(nbytes: int) -> NDArray[np.uint8] | None:
    """Allocate zeros aligned to a cache line; return None if there is too little memory."""
    try:
        memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError):  # the latter where an address cannot say so much
        return None
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + nbytes]
