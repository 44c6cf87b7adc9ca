"""What a transport is, and the work that it starts."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm.calls.call import Array, Call
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.calls.plan import Plan
from allreduce.comm.core.locks import taken, within
from allreduce.errors import AllreduceError, ClosedError, TimeoutError, UsageError, is_interrupt

_ABOUT_SECONDS = 0.5  # in which a thread waits for what it has just started
_LOOK_SECONDS = 0.002
_waiting = "_waiting"  # a work's lock; a child made by fork takes another, as nobody may free this


def _after_fork() -> None:
    global _waiting
    _waiting = f"_waiting in {os.getpid()}"


os.register_at_fork(after_in_child=_after_fork)


class Work(ABC):
    """A started call. Its arrays belong to it until it is done."""

    @abstractmethod
    def done(self) -> bool:
        """Say whether the call is complete, after doing what can be done without blocking.

        Raises:
            AllreduceError: The communicator has failed.
        """

    def look(self) -> bool:
        """As `done`, but leave it to who waits to hear of a failure; transports' own works can."""
        raise AssertionError(f"{self!r} is not a transport's own work")

    @property
    def awaited(self) -> bool:
        """Whether a thread is in the middle of a wait for it, be it this one."""
        lock = self.__dict__.get(_waiting)
        return lock is not None and taken(lock)

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether no more of it is to come: it is complete, or has failed."""

    @property
    def unmet(self) -> bool:
        """Whether it is a recv whose message has not come; transports' own works can tell."""
        return False

    def awaited_elsewhere(self) -> bool:
        """Say whether another thread waits for an unmet recv, or is about to: it hears of the end.

        Or what a signal's handler has interrupted does, if that is who asks.
        """
        until = time.monotonic() + _ABOUT_SECONDS
        while self.unmet and not self.awaited:
            if self.look() or time.monotonic() >= until:
                return False
            time.sleep(_LOOK_SECONDS)
        return self.unmet

    @abstractmethod
    def finish(self, timeout: float | None) -> Any:
        """Block until the call is complete, and return its result; called once."""

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the call is complete, and return its result.

        Works may be waited for in any order, a different one on each member. A second wait returns
        the same result; the arrays are the caller's from the first one on. Threads that wait for
        one work share the wait of the first.

        Args:
            timeout: Seconds from now; without it, the communicator's.

        Raises:
            UsageError: The timeout is no number of seconds; nothing has happened then.
            TimeoutError: It took longer. The communicator is dead then, on all members, unless
                another thread of this one still waits for the call, or keeps it from starting.
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
        if not within(lock, seconds, lambda: self._complete(max(0.0, until - time.monotonic()))):
            raise TimeoutError(
                f"{self.where}: another thread of this rank waits for the call, and {seconds:.3g} "
                "s were too few to share its wait; nothing has ended by this, so wait longer"
            )
        return self._value

    def _complete(self, timeout: float | None) -> None:
        """Have the result, which is made once: half of it may be in the caller's array."""
        if self._broken is not None:
            self.done()  # the communicator may have died of it
            raise ClosedError(
                f"{self.where}: an earlier wait ended by {self._broken!r} while it made the "
                "result, which may be half made; make the call again"
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
        """Return the source and the tag of the message that a completed recv got."""
        raise UsageError(f"{self.where}: only the work of a recv has a source and a tag")

    def __repr__(self) -> str:
        state = "waited for" if self._finished else "started"
        return f"<{type(self).__name__} {self.where}: {state}>"

    where: str = ""  # who started what, for messages: "[shared] rank 2: all_reduce"
    _finished = False
    _broken: BaseException | None = None  # what ended a wait that may have begun with the result
    _value: Any = None


def _seconds(where: str, timeout: Any) -> float:
    kinds = int | float | np.integer | np.floating
    if isinstance(timeout, kinds) and 0 <= timeout < math.inf:
        return float(timeout)
    raise UsageError(
        f"{where}: wait() takes a timeout in seconds, 0 or more, or None, but got {timeout!r}"
    )


class Transport(ABC):
    """One member's way to the others. Calls take contiguous arrays, checked by the caller."""

    name: str  # what `transport=` and `ALLREDUCE_TRANSPORT` say
    index: int  # this member
    any_thread = True  # whether it may be called from every thread

    @property
    @abstractmethod
    def members(self) -> tuple[MemberInfo, ...]:
        """All members."""

    @abstractmethod
    def admit(self) -> None:
        """Refuse processes and threads that must not use this, before anything of it is touched.

        Raises:
            UsageError: This process was made by fork, or MPI takes no calls of this thread.
        """

    @abstractmethod
    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> Work:
        """Start a call; `result()` makes what its `wait` returns."""

    def bind(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> Callable[[], Work]:
        """Return what starts this call, as often as wanted; once at a time."""
        return functools.partial(self.start, call, x, out, result)

    @abstractmethod
    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan:
        """Say what `start` would do with these."""

    def called(self, member: int) -> str:
        """Name a member as people know it: "rank 7 (member 2)"."""
        return str(self.members[member])

    @property
    @abstractmethod
    def dead(self) -> bool:
        """Whether an error has ended the communicator."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise what has ended the communicator, if it has ended: the cause first, then that."""

    @abstractmethod
    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate symmetric memory: one part per member, mapped by all; a collective call."""

    @abstractmethod
    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        """Make the communicator dead on all members; what was started touches no array any more.

        Args:
            reason: What happened, for the others' messages.
            interrupted: Whether an interrupt such as Ctrl-C is the cause.
        """

    @abstractmethod
    def close(self, drain: bool) -> None:
        """Leave in good order; with `drain`, first complete what was started."""

    @abstractmethod
    def close_inherited(self) -> None:
        """In a child made by fork: let go of what tells the others of our parent's end.

        And of locks that other threads of the parent may have held.
        """

    @contextlib.contextmanager
    def uninterrupted(self, doing: str = "a wait") -> Iterator[None]:
        """Make the communicator dead if a signal's handler raises in the middle of something."""
        try:
            yield
        except AllreduceError:
            raise
        except BaseException as error:
            reason = f"{doing} was interrupted by {type(error).__name__}"
            self.abort(reason, interrupted=is_interrupt(error))
            raise


@runtime_checkable
class FastTransport(Protocol):
    """A transport whose native member takes synchronous calls of plain arrays."""

    @property
    def native(self) -> _native.Member:
        """The native member."""

    def finish_fast(self, work: object, x: Array | None) -> None:
        """Complete the native work of such a call, of the input `x`, or raise why it failed."""


@runtime_checkable
class MappedTransport(Protocol):
    """A transport whose members read and write each other's symmetric memory."""

    def bind_update(
        self, call: Call, gradients: Array, values: Array, update: _native.Update, keep: object
    ) -> Callable[[], Work]:
        """Return what starts an update (updating.py), as often as wanted; once at a time."""

    def part_of(self, array: Array, member: int) -> NDArray[np.uint8]:
        """Return a member's bytes where an array of symmetric memory lies here."""


_ALIGNMENT = 64  # bytes: a cache line


def aligned(nbytes: int) -> NDArray[np.uint8] | None:
    """Allocate zeros that begin with a cache line; None where there is no room for them."""
    try:
        memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError):  # the latter where an address cannot say so much
        return None
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + nbytes]
