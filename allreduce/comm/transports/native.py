"""The common part of transports with native members: waits, warnings, failures and closing.

A member keeps its works until they have been waited for, so that their arrays stay alive. The error
that ends the communicator is raised once; later calls raise `ClosedError` with its text.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from allreduce.comm.calls.call import Array, Call
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.core import progress
from allreduce.comm.core.transport import LevelTransport
from allreduce.comm.core.work import LevelWork
from allreduce.comm.failures.reporter import FailureReporter, dead, encode
from allreduce.errors import AllreduceError, ClosedError, Finding, UsageError
from allreduce.events import logger


class NativeHandle(Protocol):
    """A native call."""

    @property
    def seq(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def failed(self) -> bool: ...
    @property
    def unmet(self) -> bool: ...


N = TypeVar("N", bound=NativeHandle)


class NativeWork(LevelWork, Generic[N]):
    """A started call; keeps its arrays alive.

    Attributes:
        native: The native call.
        call: The call, for transports whose native side may forget it.
    """

    call: Call | None = None

    def __init__(
        self,
        transport: NativeTransport[N],
        native: N,
        arrays: tuple[Array | None, ...],
        result: Callable[[], Any],
    ) -> None:
        self._transport = transport
        self._arrays = arrays
        self._result = result
        self.native = native

    @property
    def settled(self) -> bool:
        return self.native.done or self.native.failed

    @property
    def unmet(self) -> bool:
        return self.native.unmet

    def done(self) -> bool:
        if not self.native.done:
            self._transport.make_progress()
            self._transport.poll(self.native)
        return self.native.done

    def look(self) -> bool:
        return self.native.done or self._transport.wait_for(self.native, 0.0)

    def pause(self, seconds: float) -> bool:
        if not self.native.done and not self._transport.wait_for(self.native, seconds):
            self._transport.poll(self.native)
        return self.native.done

    def absent(self) -> list[int]:
        return self._transport.absent(self.native)

    def finish(self, timeout: float | None) -> Any:
        if not self.native.done:
            self._transport.complete(self.native, timeout)
        self._transport.forget(self)
        return self._result()


WARN_SECONDS = 10.0  # a longer wait logs one warning
_ANNOUNCE_SECONDS = 1.0  # a longer wait for a message is announced, for the others' errors
_PIECE_SECONDS = 1.0  # slice of a long wait; time while the process is stopped counts as one
_PRUNE = 64  # works kept before pruning complete ones


class NativeTransport(LevelTransport, Generic[N]):
    """One member of a communicator, with a native implementation."""

    drives_shared: ClassVar[bool] = False  # whether its waits drive all calls in shared memory
    _closing = True  # nothing to close before __init__ is done

    def __init__(self, index: int, reporter: FailureReporter[Any], timeout: float) -> None:
        self.index = index
        self._reporter = reporter
        self._timeout = timeout
        self._pending: set[NativeWork[N]] = set()
        self._prune_at = _PRUNE
        self._failure: str | None = None  # no error: its traceback would keep arrays alive
        self._finding: Finding | None = None
        self._closed = False
        self._lock = threading.RLock()  # reentrant: a signal handler may call abort
        self.fast_seconds = min(
            timeout, progress.IDLE_SECONDS
        )  # after it Python drives other calls, too
        self._closing = False

    def __del__(self) -> None:
        """Close if not closed yet, before the arrays of started calls are freed."""
        if not self._closing:
            self.close(drain=False)

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        """All members."""
        return self._reporter.members

    @property
    def dead(self) -> bool:
        return self._failure is not None or self.verdict() is not None

    def check_alive(self) -> None:
        if self.dead:
            raise self._error()

    def cause(self) -> AllreduceError | None:
        with self._lock:
            if self._failure is not None:
                return dead(self._reporter.where, self._failure, self._finding)
        return None if self.verdict() is None else self._reporter.error()

    def verdict(self) -> tuple[str, int] | None:
        """Return fault and culprit of a dead communicator, or None."""
        found = self._reporter.group.culprit()
        return None if found is None else found[:2]

    def rename(self, members: tuple[MemberInfo, ...]) -> None:
        self._reporter.members = members

    @property
    @abstractmethod
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that joined."""

    @abstractmethod
    def _drive(self, native: N, seconds: float) -> bool:
        """Wait for a work; return False if it failed or time ran out."""

    @abstractmethod
    def _fail_by_timeout(self, native: N, waited: float) -> bool:
        """Make the communicator dead after a timeout.

        Args:
            waited: The length of the wait in seconds.

        Returns:
            Whether the work completed at the last moment.
        """

    @abstractmethod
    def _kill(self, reason: str) -> None:
        """Make the communicator dead on all members; started calls touch no array any more.

        Args:
            reason: The text of `encode`.
        """

    def _drain(self) -> None:
        """Complete started calls that are not kept here."""

    @abstractmethod
    def _leave(self) -> None:
        """Notify the others that this member leaves, and release everything."""

    def _keep(self, work: NativeWork[N]) -> None:
        """Keep a started work: its arrays must outlive a caller that drops it without waiting."""
        self._pending.add(work)
        if len(self._pending) >= self._prune_at:
            self._pending = {one for one in self._pending if not one.settled}
            self._prune_at = max(_PRUNE, 2 * len(self._pending))

    def forget(self, work: NativeWork[N]) -> None:
        """Release a completed work's arrays."""
        with self._lock:
            self._pending.discard(work)

    @abstractmethod
    def absent(self, native: N) -> list[int]:
        """Return the members that a work waits for."""

    def poll(self, native: N) -> None:
        """Make progress without blocking; raise if the work has failed."""
        if not self.wait_for(native, 0.0) and native.failed:
            raise self._error(native)

    def complete(self, native: N, timeout: float | None, waited: float = 0.0) -> None:
        """Wait for a work.

        Args:
            timeout: Seconds from now, or None for the transport's timeout.
            waited: Seconds that its wait has lasted already.
        """
        self.admit()
        if native.failed:
            raise self._error(native)
        total = self._timeout if timeout is None else waited + timeout
        quiet = min(_ANNOUNCE_SECONDS, WARN_SECONDS, total / 2)
        if waited < quiet:
            if self.wait_for(native, quiet - waited):
                return
            waited = quiet
        with self._announced(native):
            self._complete_late(native, total, waited)

    def _complete_late(self, native: N, total: float, waited: float) -> None:
        """Continue a long wait: warn, and raise a timeout later."""
        if waited < WARN_SECONDS < total:
            if self._wait_on(native, WARN_SECONDS - waited):
                return
            waited = WARN_SECONDS
        if WARN_SECONDS <= waited < total and not native.failed:
            logger.warning(
                "%s has waited %g s in %s",
                *(self._reporter.where, waited, self._waiting(native)),
            )
        if self._wait_on(native, max(0.0, total - waited)):
            return
        if not native.failed and self._fail_by_timeout(native, total):
            return
        raise self._error(native)

    def _wait_on(self, native: N, seconds: float) -> bool:
        """As `wait_for`, in slices; each counts with its nominal length."""
        while seconds > _PIECE_SECONDS and not native.failed:
            if self.wait_for(native, _PIECE_SECONDS):
                return True
            seconds -= _PIECE_SECONDS
        return self.wait_for(native, seconds)

    def _announced(self, native: N) -> contextlib.AbstractContextManager[object]:  # noqa: ARG002
        """Announce to the others, during the block, the message that this member waits in."""
        return contextlib.nullcontext()

    @abstractmethod
    def _waiting(self, native: N) -> str:
        """Describe a work's call and the members that it waits for: last call and state."""

    def make_progress(self) -> float:
        """Make progress on other calls; return the seconds until this is due again."""
        return progress.make_progress(shared=not self.drives_shared)

    def wait_for(self, native: N, seconds: float) -> bool:
        """Wait for a work; return False if it failed or time ran out."""
        self.admit()
        try:
            return self._drive_all(native, seconds) if seconds else self._drive(native, 0.0)
        except BaseException as error:  # a signal handler raised in the middle of a collective
            self.abort_interrupted("a wait", error)
            raise

    def _drive_all(self, native: N, seconds: float) -> bool:
        """Wait for a work, and drive other calls meanwhile."""
        most = self.make_progress()
        if seconds <= most:
            return self._drive(native, seconds)
        limit = time.monotonic() + seconds
        while not self._drive(native, min(seconds, most)):
            if native.failed or seconds <= most:
                return False
            most = self.make_progress()
            seconds = max(0.0, limit - time.monotonic())
        return True

    def admit(self) -> None:
        if self.inherited:
            raise UsageError(
                f"{self._reporter.where}: process {os.getpid()} was forked from the process that "
                "joined, and cannot use its communicator"
            )

    def _error(self, native: N | None = None, own: Call | None = None) -> AllreduceError:
        """Return the error of a dead communicator: first its cause, later `ClosedError`.

        Args:
            native: The work that this member waits for, or None.
            own: Its call; default: from the work.
        """
        if own is None:
            with self._lock:
                calls = (work.call for work in self._pending if work.native is native)
                own = next(calls, None)
        # Finding the cause may take a while, so do it without the lock.
        known = self._closed or self._failure is not None
        error = None if known else self._reporter.error(native, own)
        with self._lock:
            if self._closed:
                return ClosedError(f"{self._reporter.where}: the communicator is closed")
            if self._failure is None and error is not None:
                self._failure, self._finding = str(error), error.finding
                return error
            return dead(self._reporter.where, str(self._failure), self._finding)

    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        if self.inherited:
            return
        finding = Finding("aborted", reason, interrupted=interrupted)
        self._kill(encode(finding))
        with self._lock:
            if self._failure is None:
                self._failure, self._finding = f"this member aborted it: {reason}", finding

    def end(self, finding: Finding) -> None:
        if not self.inherited:
            self._kill(encode(finding))

    def close_inherited(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may hold it

    def close(self, drain: bool) -> None:
        if self.inherited:
            return
        mine = False
        try:
            with self._lock:
                if self._closing:
                    return
                mine = self._closing = True
                pending = [work for work in self._pending if not work.settled]
            if drain and self._failure is None:
                for work in pending:
                    if not work.awaited_elsewhere():
                        work.wait()
                self._drain()
        finally:  # even if a signal handler interrupted the above
            if mine:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self._closed = True  # waits of other threads are about to fail
        self._leave()
        with self._lock:
            self._pending.clear()
