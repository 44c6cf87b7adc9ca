"""The transport over TCP: native, one epoll thread per process.

Every call is posted to all members with its signature; nothing of it is sent, and no output is
touched, before all posts are there and agree. Small contributions travel with the posts, others in
chunks, in one hop or along a ring; each element's result is made once and distributed, or made by
everybody in member order: results are equal on all members, to the bit.

Started calls advance by themselves. A connection that ends without a goodbye means that its member
died.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm import tcp_calls
from allreduce.comm.base import Array, Quick, Transport, Work
from allreduce.comm.call import Call
from allreduce.comm.tcp_failures import TcpMemberInfo, TcpWitness
from allreduce.errors import AllreduceError, ClosedError, OutOfMemoryError, UsageError
from allreduce.events import logger

WARN_SECONDS = 10.0  # a wait this long is reported, once
_PRUNE = 64  # started works without a wait that are kept before looking which are complete
_LEAVE_SECONDS = 2.0  # how long last words may take to arrive
_FAIL_SECONDS = 5.0  # how long the engine may take to let go of the arrays of a dead communicator
_ALIGNMENT = 64


class TcpWork(Work):
    """A started call of the tcp transport; keeps its arrays alive."""

    def __init__(
        self,
        transport: TcpTransport,
        native: _native.TcpWork,
        arrays: tuple[Array | None, ...],
        result: Callable[[], Any],
    ) -> None:
        self._transport = transport
        self._arrays = arrays
        self._result = result
        self.native = native

    @property
    def settled(self) -> bool:
        """Whether no more of it is to come: it is complete, or has failed."""
        return self.native.done or self.native.failed

    def done(self) -> bool:
        if not self.native.done:
            self._transport.poll(self.native)
        return self.native.done

    def finish(self, timeout: float | None) -> Any:
        if not self.native.done:
            self._transport.complete(self.native, timeout)
        self._transport.forget(self)
        return self._result()

    def origin(self) -> tuple[int, int]:
        return self.native.source, self.native.tag


class TcpTransport(Transport):
    """One member of a communicator whose members are connected each with each.

    Args:
        index: This member.
        sockets: Descriptors for each member, one for words and then those for data; taken over.
        members: All members.
        name: The communicator's.
        timeout: Seconds that any wait may last.
    """

    name = "tcp"

    def __init__(
        self,
        index: int,
        sockets: list[list[int]],
        members: tuple[TcpMemberInfo, ...],
        name: str,
        timeout: float,
    ) -> None:
        self.index = index
        self._member = _native.TcpMember(index, sockets)
        self._witness = TcpWitness(self._member, name, index, members)
        self._size = len(members)
        self._timeout = timeout
        self._pending: set[TcpWork] = set()
        self._prune_at = _PRUNE
        self._failure: str | None = None
        self._closed = False
        self._lock = threading.Lock()
        self.quick_seconds = min(timeout, WARN_SECONDS)

    def quick(self) -> Quick | None:
        return None

    def finish_quick(self, unfinished: object) -> None:
        raise AssertionError(f"there is no quick way that could have left {unfinished!r}")

    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> TcpWork:
        self._check_own()
        tcp_calls.check(call, self._witness.where)
        if x is not None:  # a NumPy scalar has no memory of its own
            x = np.asarray(x)
        signature = tcp_calls.encode(call, self._witness.where)
        words = tcp_calls.words(call, self._size)
        with self._lock:  # calls of several threads get one order
            native = self._member.start(words, signature, _address(x), _address(out))
            work = TcpWork(self, native, (x, out), result)
            self._pending.add(work)  # whoever drops a work without waiting keeps its arrays
            if len(self._pending) >= self._prune_at:
                self._pending = {one for one in self._pending if not one.settled}
                self._prune_at = max(_PRUNE, 2 * len(self._pending))
        if self._closed or self._failure is not None:
            raise self._error(0.0)
        return work

    def _check_own(self) -> None:
        """Refuse a child made by fork: other threads' locks may be held in it for ever."""
        if self._member.inherited:
            raise UsageError(
                f"{self._witness.where}: process {os.getpid()} was forked from the process that "
                "joined, and cannot use its communicator"
            )

    def forget(self, work: TcpWork) -> None:
        """Let go of a completed work."""
        with self._lock:
            self._pending.discard(work)

    def poll(self, native: _native.TcpWork) -> None:
        """Raise if the work has failed."""
        self._check_own()
        if native.failed:
            raise self._error(0.0)

    def complete(self, native: _native.TcpWork, timeout: float | None) -> None:
        """Wait for a work.

        Args:
            native: The work.
            timeout: Seconds from now, or None for the transport's own.
        """
        self._check_own()
        total = self._timeout if timeout is None else timeout
        waited = min(total, WARN_SECONDS)
        if self._wait(native, waited):
            return
        if waited < total and not native.failed:
            logger.warning(
                "%s has waited %g s in call #%d: %s",
                *(self._witness.where, waited, native.seq, self._witness.missing(native.key)),
            )
            if self._wait(native, total - waited):
                return
        if not native.failed:
            missing = self._member.missing(native.key)
            blamed = next((m for m in missing if m != self.index), self.index)
            self._member.blame_timeout(blamed, native.key)
            if self._wait(native, _FAIL_SECONDS):  # the last moment was enough
                return
        raise self._error(total)

    def _wait(self, native: _native.TcpWork, seconds: float) -> bool:
        try:
            return native.wait(seconds)
        except BaseException as error:  # a signal's handler raised in the middle of a collective
            self.abort(f"a wait was interrupted by {type(error).__name__}")
            raise

    def _error(self, seconds: float) -> AllreduceError:
        """Return what killed the communicator: the cause first, then that it is dead."""
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
        """Nothing is left to do: the engine's thread drives all calls."""

    def abort(self, reason: str) -> None:
        if self._member.inherited:
            return
        self._member.abort(reason)
        with self._lock:
            self._failure = self._failure or f"this member aborted it: {reason}"

    def close(self, drain: bool) -> None:
        if self._member.inherited:
            return
        with self._lock:
            if self._closed:
                return
            pending = [work for work in self._pending if not work.settled]
        try:
            if drain and self._failure is None:
                for work in pending:
                    work.wait()
        finally:
            farewell = self._member.leave(_LEAVE_SECONDS)
            with self._lock:
                self._closed = True
                self._pending.clear()
            limit = time.monotonic() + 2 * _LEAVE_SECONDS
            while not farewell.wait(_LEAVE_SECONDS) and time.monotonic() < limit:
                logger.debug("%s: last words are still on their way", self._witness.where)

    def close_inherited(self) -> None:
        """In a child made by fork: let go of the sockets, whose end of file tells of our parent."""
        self._member.close_inherited()

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate ordinary memory, aligned to a cache line; all members ask for the same size."""
        call = Call("empty", None, "bytes", nbytes, None, self._witness.name)
        self.start(call, None, None, lambda: None).wait()
        try:
            memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):  # the latter where an address cannot say so much
            memory = None
        # Everybody learns whether everybody has it.
        mine, all_have = np.array([memory is not None]), np.zeros(self._size, bool)
        call = Call("all_gather", None, "bool", 1, None, self._witness.name)
        self.start(call, mine, all_have, lambda: None).wait()
        if memory is None or not all_have.all():
            without = self._witness.members[int(np.flatnonzero(~all_have)[0])]
            raise OutOfMemoryError(
                f"{self._witness.where}: empty: {without} has no {nbytes} bytes of memory; ask for "
                "less on every rank"
            )
        offset = -memory.ctypes.data % _ALIGNMENT
        return memory[offset : offset + nbytes]


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])
