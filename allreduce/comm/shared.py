"""The transport between threads and processes of one host: memory that all members map."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm.base import Array, Quick, Transport, Work
from allreduce.comm.call import Call, kind
from allreduce.comm.failures import Witness
from allreduce.comm.local_group import LocalGroup
from allreduce.comm.symmetric import Symmetric
from allreduce.errors import AllreduceError, ClosedError, UsageError
from allreduce.events import logger

WARN_SECONDS = 10.0  # a wait this long is reported, once
_PRUNE = 64  # started works without a wait that are kept before looking which are complete


class SharedWork(Work):
    """A started call of the shared transport; keeps its arrays alive."""

    def __init__(
        self,
        transport: SharedTransport,
        work: _native.Work,
        arrays: tuple[Array | None, ...],
        result: Callable[[], Any],
    ) -> None:
        self._transport = transport
        self._work = work
        self._arrays = arrays
        self._result = result

    @property
    def settled(self) -> bool:
        """Whether no more of it is to come: it is complete, or has failed."""
        return self._work.done or self._work.failed

    def done(self) -> bool:
        if not self._work.done:
            self._transport.poll(self._work)
        return self._work.done

    def finish(self, timeout: float | None) -> Any:
        if not self._work.done:
            self._transport.complete(self._work, timeout)
        self._transport.forget(self._work)
        return self._result()


class SharedTransport(Transport):
    """One member of a communicator whose members share memory."""

    name = "shared"

    def __init__(self, local: LocalGroup, index: int, name: str, timeout: float) -> None:
        self._local = local
        self._member = _native.Member(local.group, index)
        self._witness = Witness(local.group, name, index, local.members)
        self.index = index
        self._timeout = timeout
        self._pending: dict[int, SharedWork] = {}
        self._prune_at = _PRUNE
        self._symmetric = Symmetric(local, self._member, index, timeout)
        self._failure: str | None = None
        self._closed = False
        self._lock = threading.Lock()
        self.quick_seconds = min(timeout, WARN_SECONDS)

    def quick(self) -> Quick | None:
        return self._member.all_reduce

    def finish_quick(self, unfinished: object) -> None:
        assert isinstance(unfinished, _native.Work)
        self.complete(unfinished, None, self.quick_seconds)

    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> SharedWork:
        packed = kind(call.collective, call.op, call.root or 0)
        native = self._member.start(packed, x, out, call.counts, call.receives)
        if native.failed:
            self.complete(native, None)
        work = SharedWork(self, native, (x, out), result)
        with self._lock:  # whoever drops a work without waiting must not drop its arrays
            self._pending[native.seq] = work
            if len(self._pending) >= self._prune_at:
                self._pending = {seq: one for seq, one in self._pending.items() if not one.settled}
                self._prune_at = max(_PRUNE, 2 * len(self._pending))
        return work

    def forget(self, work: _native.Work) -> None:
        """Let go of a completed work's arrays."""
        with self._lock:
            self._pending.pop(work.seq, None)

    def poll(self, work: _native.Work) -> None:
        """Do what can be done now; raise if the work has failed."""
        if not self._wait(work, 0.0) and work.failed:
            raise self._error(0.0)

    def complete(self, work: _native.Work, timeout: float | None, waited: float = 0.0) -> None:
        """Wait for a work.

        Args:
            work: The work.
            timeout: Seconds from now, or None for the transport's own.
            waited: How long its wait has lasted already; a wait that failed at once has not.
        """
        if work.failed:
            raise self._error(0.0)
        total = self._timeout if timeout is None else waited + timeout
        if waited < WARN_SECONDS < total:
            if self._wait(work, WARN_SECONDS - waited):
                return
            waited = WARN_SECONDS
        if waited >= WARN_SECONDS and not work.failed:
            logger.warning(
                "%s has waited %g s in call #%d: %s",
                *(self._witness.where, waited, work.seq, self._witness.missing(work.seq)),
            )
        if self._wait(work, max(0.0, total - waited)):
            return
        if not work.failed:
            missing = self._local.group.missing(work.seq)
            blamed = next((m for m in missing if m != self.index), self.index)
            self._local.group.blame_timeout(blamed, self.index, work.seq)
            # Another thread may be in the middle of a step of it: from here on none is.
            self._member.abort("it gave up")
        raise self._error(total)

    def _wait(self, work: _native.Work, seconds: float) -> bool:
        if self._local.group.inherited:  # driving it here would do our parent's share twice
            raise self._error(0.0)
        try:
            return self._member.wait(work, seconds)
        except BaseException as error:  # a signal's handler raised in the middle of a collective
            self.abort(f"a wait was interrupted by {type(error).__name__}")
            raise

    def _error(self, seconds: float) -> AllreduceError:
        """Return what killed the communicator: the cause first, then that it is dead."""
        if self._local.group.inherited:
            return UsageError(
                f"{self._witness.where}: process {os.getpid()} was forked from the process that "
                "joined, and cannot use its communicator"
            )
        with self._lock:
            if self._closed:
                return ClosedError(f"{self._witness.where}: the communicator is closed")
            if self._failure is not None:
                return ClosedError(
                    f"{self._witness.where}: the communicator is dead since: {self._failure}"
                )
            error = self._witness.error(seconds)
            self._failure = str(error)
            return error

    def progress(self) -> None:
        _native.progress()

    def abort(self, reason: str) -> None:
        self._member.abort(reason)
        with self._lock:
            self._failure = self._failure or f"this member aborted it: {reason}"

    def close(self, drain: bool) -> None:
        with self._lock:
            if self._closed or self._local.group.inherited:
                return
            pending = [work for work in self._pending.values() if not work.settled]
        try:
            if drain and self._failure is None:
                for work in pending:
                    work.wait()
        finally:
            self._member.leave()
            self._local.leave()
            with self._lock:
                self._closed = True
                self._pending.clear()

    def close_inherited(self) -> None:
        """In a child made by fork: let go of the sockets, whose end of file tells of our parent."""
        self._local.links.close()

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        return self._symmetric.allocate(nbytes, self._complete_now)

    def _complete_now(self, work: _native.Work) -> None:
        if not self._wait(work, self.quick_seconds):
            self.complete(work, None, self.quick_seconds)
