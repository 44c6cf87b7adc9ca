"""The interfaces of transports and of the works that they start."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
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
from allreduce.comm.core.locks import is_locked, run_locked
from allreduce.devices import Device
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    Finding,
    TimeoutError,
    UsageError,
    is_interrupt,
)

_ABOUT_SECONDS = 0.5  # between a thread's start of a call and its wait
_POLL_SECONDS = 0.002
_waiting = (
    "_waiting"  # name of a work's lock; a forked child uses another, as the parent's may stay held
)


def _after_fork() -> None:
    global _waiting
    _waiting = f"_waiting in {os.getpid()}"


os.register_at_fork(after_in_child=_after_fork)


class Work(ABC):
    """A started call, which owns its arrays until it is done."""

    @abstractmethod
    def done(self) -> bool:
        """Make progress without blocking, and return whether the call is complete.

        Raises:
            AllreduceError: The communicator has failed.
        """

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether it is complete or has failed."""

    @abstractmethod
    def finish(self, timeout: float | None) -> Any:
        """Block until the call is complete, and return its result; called once."""

    def synchronize(self, stream: Any) -> Any:  # noqa: ARG002
        """Have later work of a device's stream wait for the call; returns its result.

        The host waits only for calls that are not enqueued on the device.
        """
        return self.wait()

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the call is complete, and return its result.

        Members may wait for their works in different orders. After the first wait the arrays belong
        to the caller again; a second wait returns the same result. Threads may wait for the same
        work.

        Args:
            timeout: Seconds from now; default: the communicator's timeout.

        Raises:
            UsageError: The timeout is invalid; the call continues.
            TimeoutError: It took longer. The communicator is dead on all members, unless another
                thread of this one still waits for the call or keeps it from starting.
            PeerLostError: A member died or left.
            MismatchError: Members made different calls.
            ClosedError: An earlier wait was interrupted while it made the result.
        """
        lock = self.__dict__.setdefault(_waiting, threading.RLock())
        if timeout is None:
            with lock:
                self._complete(None)
            return self._value
        seconds = _seconds(self.where, timeout)
        until = time.monotonic() + seconds
        if not run_locked(
            lock, seconds, lambda: self._complete(max(0.0, until - time.monotonic()))
        ):
            raise TimeoutError(
                f"{self.where}: another thread of this rank waits for the call, and {seconds:.3g} "
                "s were too few to share its wait; the call continues, so wait longer"
            )
        return self._value

    def _complete(self, timeout: float | None) -> None:
        """Make the result once; a second attempt could work on a half-made result."""
        if self._broken is not None:
            self.done()  # the communicator may have died of it
            raise ClosedError(
                f"{self.where}: an earlier wait ended by {self._broken!r} while it made the "
                "result, which may be incomplete; make the call again"
            ) from self._broken
        if self._finished:
            return
        try:
            self._value = self.finish(timeout)
            self._finished = True
        except AllreduceError:
            raise
        except BaseException as error:  # a signal's handler raised
            if self.settled:
                self._broken = error
            raise

    def origin(self) -> tuple[int, int]:
        """Return source and tag of the message of a completed recv."""
        raise UsageError(f"{self.where}: only the work of a recv has a source and a tag")

    def __repr__(self) -> str:
        state = "waited for" if self._finished else "started"
        return f"<{type(self).__name__} {self.where}: {state}>"

    where: str = ""  # prefix of messages: "[shared] rank 2: all_reduce"
    _finished = False
    _broken: BaseException | None = None  # interrupted a wait that may have begun the result
    _value: Any = None


class TransportWork(Work):
    """A started call as its transport keeps it, to complete it when the communicator closes."""

    @abstractmethod
    def look(self) -> bool:
        """As `done`, but do not raise failures."""

    @property
    def awaited(self) -> bool:
        """Whether a thread, possibly this one, is waiting for it."""
        lock = self.__dict__.get(_waiting)
        return lock is not None and is_locked(lock)

    @property
    def unmet(self) -> bool:
        """Whether it is a recv without a message yet."""
        return False

    def awaited_elsewhere(self) -> bool:
        """Return whether another thread waits for an unmet recv, or is about to.

        That thread will raise the error. A signal handler counts the call that it interrupted.
        """
        until = time.monotonic() + _ABOUT_SECONDS
        while self.unmet and not self.awaited:
            if self.look() or time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return self.unmet


class LevelWork(TransportWork):
    """A started call of a `LevelTransport`."""

    @abstractmethod
    def pause(self, seconds: float) -> bool:
        """Wait for `seconds` at most, without a timeout error; return whether it is complete.

        Raises:
            AllreduceError: The communicator has failed.
        """

    @abstractmethod
    def absent(self) -> list[int]:
        """Return the members that it may wait for."""


def _seconds(where: str, timeout: Any) -> float:
    kinds = int | float | np.integer | np.floating
    if isinstance(timeout, kinds) and 0 <= timeout < math.inf:
        return float(timeout)
    raise UsageError(
        f"{where}: wait() takes a timeout in seconds, 0 or more, or None, but got {timeout!r}"
    )


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
