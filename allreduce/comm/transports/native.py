"""What transports whose members work natively have in common: waiting, warning, failing, leaving.

A member's works are kept until they are waited for, so that nobody's arrays go while they are used.
Whatever ends the communicator is raised once as what it was, and afterwards as what it is dead of.
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
from allreduce.comm.core.transport import Transport, Work
from allreduce.comm.failures.reporter import FailureReporter, dead, encode
from allreduce.errors import AllreduceError, ClosedError, Finding, UsageError, is_interrupt
from allreduce.events import logger


class Started(Protocol):
    """A call as the native side has it."""

    @property
    def seq(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def failed(self) -> bool: ...
    @property
    def unmet(self) -> bool: ...


N = TypeVar("N", bound=Started)


class NativeWork(Work, Generic[N]):
    """A started call; keeps its arrays alive.

    Attributes:
        native: As the native side has it.
        call: The call, where the native side forgets it before it is done.
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
        """Wait a moment; returns whether it is complete. That it is not is nobody's fault yet.

        Raises:
            AllreduceError: The communicator has failed.
        """
        if not self.native.done and not self._transport.wait_for(self.native, seconds):
            self._transport.poll(self.native)
        return self.native.done

    def absent(self) -> list[int]:
        """Say for which members it waits."""
        return self._transport.absent(self.native)

    def finish(self, timeout: float | None) -> Any:
        if not self.native.done:
            self._transport.complete(self.native, timeout)
        self._transport.forget(self)
        return self._result()


WARN_SECONDS = 10.0  # a wait this long is reported, once
_ANNOUNCE_SECONDS = 1.0  # a wait for a message this long is told to the others, for their errors
_PIECE_SECONDS = 1.0  # of a long wait: what a process was stopped for counts as one of these
_PRUNE = 64  # started works without a wait that are kept before looking which are complete


class NativeTransport(Transport, Generic[N]):
    """One member of a communicator, which works natively.

    Args:
        index: This member.
        witness: Knows why the communicator died.
        timeout: Seconds that any wait may last.
    """

    drives_shared: ClassVar[bool] = False  # whether its waits drive all calls in shared memory
    _closing = True  # until there is something to close

    def __init__(self, index: int, witness: FailureReporter[Any], timeout: float) -> None:
        self.index = index
        self._reporter = witness
        self._timeout = timeout
        self._pending: set[NativeWork[N]] = set()
        self._prune_at = _PRUNE
        self._failure: str | None = None
        self._closed = False
        self._lock = threading.RLock()  # a signal's handler may abort whatever it interrupts
        self.quick_seconds = min(timeout, progress.IDLE_SECONDS)  # then Python drives other calls
        self._closing = False

    def __del__(self) -> None:
        """Leave in good order if nobody has, before the arrays of what was started are freed."""
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

    def verdict(self) -> tuple[str, int] | None:
        """Say what killed the communicator, if it is dead: the fault, and the member to blame."""
        found = self._reporter.group.culprit()
        return None if found is None else found[:2]

    def rename(self, members: tuple[MemberInfo, ...]) -> None:
        """Have messages name members as the larger communicator does that this one serves."""
        self._reporter.members = members

    @property
    @abstractmethod
    def inherited(self) -> bool:
        """Whether this process was made by fork, from the one that joined."""

    @abstractmethod
    def _drive(self, native: N, seconds: float) -> bool:
        """Wait for a work; False if it has failed or the time is over."""

    @abstractmethod
    def _surrender(self, native: N, waited: float) -> bool:
        """Make the communicator dead for a wait that took too long.

        Args:
            native: What was waited for.
            waited: Seconds.

        Returns:
            Whether the work is complete, because the last moment was enough.
        """

    @abstractmethod
    def _kill(self, reason: str) -> None:
        """Make the communicator dead on all members; no array is touched after that.

        Args:
            reason: As `encode` made it.
        """

    def _drain(self) -> None:
        """Complete what was started and is not kept here: by other threads, which wait for it."""

    @abstractmethod
    def _leave(self) -> None:
        """Tell the others that this member leaves in good order, and let go of everything."""

    def payload_bytes(self) -> list[int]:
        """Return the bytes of data that have gone to each member through a socket."""
        return [0] * len(self.members)

    def _keep(self, work: NativeWork[N]) -> None:
        """Keep what is started: who drops a work without waiting must not drop its arrays."""
        self._pending.add(work)
        if len(self._pending) >= self._prune_at:
            self._pending = {one for one in self._pending if not one.settled}
            self._prune_at = max(_PRUNE, 2 * len(self._pending))

    def _interrupted(self, error: BaseException) -> None:
        """Give up after a signal's handler raised in a start: nobody would keep its arrays."""
        reason = f"a start was interrupted by {type(error).__name__}"
        self.abort(reason, interrupted=is_interrupt(error))

    def forget(self, work: NativeWork[N]) -> None:
        """Let go of a completed work's arrays."""
        with self._lock:
            self._pending.discard(work)

    def wait_for(self, native: N, seconds: float) -> bool:
        """Wait a moment for a work; False if it has failed or the time is over."""
        return self._wait(native, seconds)

    @abstractmethod
    def absent(self, native: N) -> list[int]:
        """Say for which members a work waits."""

    def poll(self, native: N) -> None:
        """Do what can be done now; raise if the work has failed."""
        if not self._wait(native, 0.0) and native.failed:
            raise self._error(native)

    def complete(self, native: N, timeout: float | None, waited: float = 0.0) -> None:
        """Wait for a work.

        Args:
            native: The work.
            timeout: Seconds from now, or None for the transport's own.
            waited: How long its wait has lasted already; a wait that failed at once has not.
        """
        self.admit()
        if native.failed:
            raise self._error(native)
        total = self._timeout if timeout is None else waited + timeout
        quiet = min(_ANNOUNCE_SECONDS, WARN_SECONDS, total / 2)
        if waited < quiet:
            if self._wait(native, quiet - waited):
                return
            waited = quiet
        with self._announced(native):
            self._complete_late(native, total, waited)

    def _complete_late(self, native: N, total: float, waited: float) -> None:
        """Go on waiting for a work: warn, and then give up."""
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
        if not native.failed and self._surrender(native, total):
            return
        raise self._error(native)

    def _wait_on(self, native: N, seconds: float) -> bool:
        """As `_wait`, in pieces, of which each counts as it was meant to last."""
        while seconds > _PIECE_SECONDS and not native.failed:
            if self._wait(native, _PIECE_SECONDS):
                return True
            seconds -= _PIECE_SECONDS
        return self._wait(native, seconds)

    def _announced(self, native: N) -> contextlib.AbstractContextManager[object]:  # noqa: ARG002
        """Have the others know, while this lasts, in which message this member waits, if in one."""
        return contextlib.nullcontext()

    @abstractmethod
    def _waiting(self, native: N) -> str:
        """Say in which call a work waits, for whom, what they did last and whether they live."""

    def make_progress(self) -> float:
        """Do what can be done of other calls; returns how long this thread may wait until then."""
        return progress.make_progress(shared=not self.drives_shared)

    def _wait(self, native: N, seconds: float) -> bool:
        self.admit()
        try:
            return self._drive_all(native, seconds) if seconds else self._drive(native, 0.0)
        except BaseException as error:  # a signal's handler raised in the middle of a collective
            reason = f"a wait was interrupted by {type(error).__name__}"
            self.abort(reason, interrupted=is_interrupt(error))
            raise

    def _drive_all(self, native: N, seconds: float) -> bool:
        """Wait for a work, and go on with other calls meanwhile."""
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
        """Return what killed the communicator: the cause first, then that it is dead.

        Args:
            native: What this member waits for; None if for nothing.
            own: The call of it; without this, as its work knows it.
        """
        if own is None:
            with self._lock:
                calls = (work.call for work in self._pending if work.native is native)
                own = next(calls, None)
        # It may take a while to find out the cause: what needs the lock must not wait for that.
        known = self._closed or self._failure is not None
        error = None if known else self._reporter.error(native, own)
        with self._lock:
            if self._closed:
                return ClosedError(f"{self._reporter.where}: the communicator is closed")
            if self._failure is None and error is not None:
                self._failure = str(error)
                return error
            return dead(self._reporter.where, self._failure)

    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        if self.inherited:
            return
        self._kill(encode(Finding("aborted", reason, interrupted=interrupted)))
        with self._lock:
            self._failure = self._failure or f"this member aborted it: {reason}"

    def close_inherited(self) -> None:
        self._lock = threading.RLock()  # another thread may have held it

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
        finally:  # nobody else does it any more, whatever a signal's handler has interrupted
            if mine:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self._closed = True  # what other threads wait for is about to fail
        self._leave()
        with self._lock:
            self._pending.clear()
