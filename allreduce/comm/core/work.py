"""The interfaces of started calls."""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from allreduce.comm.core.locks import is_locked, run_locked
from allreduce.errors import AllreduceError, ClosedError, TimeoutError, UsageError

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
