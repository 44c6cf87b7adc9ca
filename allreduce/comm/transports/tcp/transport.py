"""The transport over TCP: native, one epoll thread per process.

Each member posts each call with its signature to all members. No data is sent and no output is
touched before all posts have arrived and agree. Small inputs travel with the posts, larger ones in
chunks, in one hop or along a ring. Each element is reduced once and distributed, or reduced by
every member in member order, so results are bitwise equal on all members.

Started calls progress without a waiting thread. A connection that closes without a goodbye means
that its member died.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm.calls import call_site
from allreduce.comm.calls.call import ANY, MESSAGES, Array, Call, agreed_shape
from allreduce.comm.calls.plan import Plan
from allreduce.comm.core.transport import aligned
from allreduce.comm.failures.reporter import wait_text
from allreduce.comm.selection.choosing import Choices
from allreduce.comm.transports.native import NativeTransport, NativeWork
from allreduce.comm.transports.tcp import calls
from allreduce.comm.transports.tcp.failures import NOBODY, TcpFailureReporter, TcpMemberInfo
from allreduce.comm.transports.tcp.plan import plan_tcp
from allreduce.errors import OutOfMemoryError
from allreduce.events import logger

_LEAVE_SECONDS = 2.0  # for goodbyes to arrive
_FAIL_SECONDS = 5.0  # for the engine to release the arrays of a dead communicator


class TcpWork(NativeWork[_native.TcpWork]):
    """A started call of the tcp transport.

    Attributes:
        call: The call; None if it was started after the communicator ended.
    """

    def origin(self) -> tuple[int, int]:
        return self.native.source, self.native.tag


class TcpTransport(NativeTransport[_native.TcpWork]):
    """One member of a communicator with a connection between each pair of members.

    Args:
        sockets: Descriptors for each member, which the transport owns: one for control frames, one
            for probes, the others for data.
        choices: The algorithm of each call.
    """

    name = "tcp"
    wait_priority, closes_together = 0, False
    reporter_class: ClassVar[type[TcpFailureReporter]] = TcpFailureReporter

    def __init__(
        self,
        index: int,
        sockets: list[list[int]],
        members: tuple[TcpMemberInfo, ...],
        name: str,
        timeout: float,
        choices: Choices,
    ) -> None:
        self._choices = choices
        self._member = _native.TcpMember(index, sockets)
        super().__init__(index, self.reporter_class(self._member, name, index, members), timeout)
        self._name = name
        self._size = len(members)

    @property
    def inherited(self) -> bool:
        return self._member.inherited

    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> TcpWork:
        self.admit()
        if x is not None:  # NumPy scalars have no buffer
            x = np.asarray(x)
        words = calls.words(call, self._size, self._choices)
        return self._begin(call, words, self._post(call, x, out), (x, out), result)

    def _post(self, call: Call, x: Array | None, out: Array | None) -> bytes:
        """Return the post of a call: its signature and note."""
        array = x if x is not None else out
        shape = () if array is None else agreed_shape(call, array.shape)
        return calls.annotated(
            calls.encode(call, self._reporter.where, shape), call_site.note(x, out)
        )

    def _begin(
        self,
        call: Call,
        words: tuple[object, ...],
        post: bytes,
        arrays: tuple[Array | None, Array | None],
        result: Callable[[], Any],
    ) -> TcpWork:
        """Start a call natively.

        Args:
            words: The native call to run, which may be a part of it.
            post: The call's post to the other members.
            arrays: The input and the output.
        """
        late = call.collective not in MESSAGES and self._reporter.ended_in_known_call
        try:
            with self._lock:  # order the calls of several threads
                native = self._member.start(words, post, *map(_address, arrays))
                work = TcpWork(self, native, arrays, result)
                work.call = None if late else call
                self._keep(work)
        except BaseException as error:
            self.abort_interrupted("a start", error)  # the call's arrays are not kept
            raise
        if self._closed or self._failure is not None:
            raise self._error()
        return work

    def absent(self, native: _native.TcpWork) -> list[int]:
        return self._member.missing(native.key)

    def _drive(self, native: _native.TcpWork, seconds: float) -> bool:
        return native.wait(seconds)

    def _waiting(self, native: _native.TcpWork) -> str:
        what = self._reporter.named(self.index, native.key)
        return f"{what}: {self._reporter.missing(native.key)}"

    def _message(self, native: _native.TcpWork) -> Call | None:
        """Return the call of a send or recv; None for a collective."""
        call = self._reporter.call(self.index, native.key) if native.key != native.seq else None
        return call if call is not None and call.collective in MESSAGES else None

    @contextlib.contextmanager
    def _announced(self, native: _native.TcpWork) -> Iterator[None]:
        call = self._message(native)
        if call is None or call.root is None:
            self._member.tell_under_way()
            yield
            return
        peer = self.index if call.root == ANY else call.root
        self._member.tell_awaited(peer, 1 + MESSAGES.index(call.collective))
        yield  # not after an error: the others may still ask
        self._member.tell_awaited(NOBODY)

    def _fail_by_timeout(self, native: _native.TcpWork, waited: float) -> bool:
        absent = self._reporter.absent(native.key)
        blamed = next((m for m in absent if m != self.index), self.index)
        reason = wait_text(waited, self._reporter.missing(native.key))
        self._member.blame_timeout(blamed, native.key, reason)
        return self.wait_for(native, _FAIL_SECONDS)

    def _kill(self, reason: str) -> None:
        self._member.abort(reason)

    def _leave(self) -> None:
        farewell = self._member.leave(_LEAVE_SECONDS)
        limit = time.monotonic() + 2 * _LEAVE_SECONDS
        while not farewell.wait(_LEAVE_SECONDS) and time.monotonic() < limit:
            logger.debug("%s: goodbyes are still in flight", self._reporter.where)

    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan:  # noqa: ARG002
        return plan_tcp(call, self.index, self._size, self._choices)

    def close_inherited(self) -> None:
        """In a forked child, close the sockets: their end of file means the parent's end."""
        super().close_inherited()
        self._member.close_inherited()

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate ordinary memory, aligned to a cache line; all members ask for the same size."""
        call = Call("empty", None, "bytes", nbytes, None, self._name)
        self.start(call, None, None, lambda: None).wait()
        memory = aligned(nbytes)
        # All members agree whether all have the memory.
        mine, all_have = np.array([memory is not None]), np.zeros(self._size, bool)
        call = Call("all_gather", None, "bool", 1, None, self._name)
        self.start(call, mine, all_have, lambda: None).wait()
        if memory is None or not all_have.all():
            without = self._reporter.members[int(np.flatnonzero(~all_have)[0])]
            raise OutOfMemoryError(
                f"{self._reporter.where}: empty: {without} has no {nbytes} bytes of memory; ask "
                "for less on every rank"
            )
        return memory


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])
