"""One device's member of an NCCL communicator."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from nccl.bindings import nccl as api
from numpy.typing import NDArray

from allreduce.comm.calls.call import Call, item_bytes, starts
from allreduce.comm.core.transport import PreparedOnDevice
from allreduce.comm.transports.nccl import library
from allreduce.devices import COLLECTIVE, Device, Event
from allreduce.errors import ClosedError, InternalError, TimeoutError
from allreduce.events import logger

_LOOK_SECONDS = 0.0005  # between looks at an unfinished call
_FINALIZE_SECONDS = 2.0  # for the other members to leave, too


class _Order:
    """The order of calls on one GPU: one thread enqueues at a time, each call behind the last.

    NCCL wants it to be the same on all members, whichever communicators the calls are of.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last: tuple[Any, Event] | None = None  # a stream, and the end of its last call


# By the GPU's UUID: logical devices share it. It goes with the last member.
_orders: weakref.WeakValueDictionary[str, _Order] = weakref.WeakValueDictionary()


class NcclMember:
    """A member of a communicator, whose calls are enqueued on its device's collective stream.

    Args:
        device: The device.
        size: The number of members.
        rank: This one.
        identifier: The communicator's.
        where: A prefix for messages.
        timeout: Seconds that making it, or enqueuing a call, may take.
        check: Raises if the communicator has failed.
    """

    def __init__(
        self,
        device: Device,
        size: int,
        rank: int,
        identifier: NDArray[np.uint8],
        where: str,
        timeout: float,
        check: Callable[[], None],
    ) -> None:
        self.device, self.size, self.rank = device, size, rank
        self.where = where
        self._timeout, self._check = timeout, check
        self.stream: Any = device.own(COLLECTIVE)
        self.aborted = False
        self._finalized: float | None = None  # when it began to
        self._lock = threading.RLock()
        self._order = _orders.setdefault(device.identity, _Order())
        self._enter()
        try:
            self.handle = library.begin(size, rank, identifier)
        except api.NCCLError as error:
            raise InternalError(
                f"{where}: NCCL could not make a communicator: {error}; {library.advice()}"
            ) from None
        try:
            self._settle("make a communicator")
        except BaseException:
            self.abort()
            raise

    def _enter(self) -> None:
        enter: Callable[[], None] = getattr(self.device, "enter")  # noqa: B009  # of GPUs
        enter()

    def _settle(self, what: str) -> None:
        """Wait until NCCL has finished what it does in the background.

        A call is on the stream only then: the first one may have to connect members.
        """
        until = time.monotonic() + self._timeout
        while (status := self.status()) == "InProgress":
            if time.monotonic() >= until:
                self.abort()
                raise TimeoutError(
                    f"{self.where}: NCCL did not {what} within {self._timeout:g} s; "
                    "NCCL_DEBUG=INFO shows what it waits for"
                )
            self._check()
            time.sleep(_LOOK_SECONDS)
        if status:
            detail = self._last_error()
            self.abort()
            raise InternalError(
                f"{self.where}: NCCL could not {what}: {status} ({detail}); {library.advice()}"
            )

    def status(self) -> str:
        """Return "" while it works, or the name of NCCL's asynchronous error."""
        with self._lock:
            if self.aborted:
                return ""
            try:
                return library.status(self.handle)
            except api.NCCLError as error:
                return str(error)

    def _last_error(self) -> str:
        with self._lock:
            return "" if self.aborted else str(api.get_last_error(self.handle))

    @contextmanager
    def enqueuing(self, ordered: bool) -> Iterator[None]:
        """Hold the device's order of calls; unless `ordered`, go behind all its earlier work."""
        order = self._order
        with order.lock:
            self._enter()
            if not ordered:
                self.device.order_behind_all(self.stream)
            if order.last is not None and order.last[0] is not self.stream:
                self.stream.wait(order.last[1])
            yield

    def enqueue(self, calls: Sequence[PreparedOnDevice], *, ordered: bool = False) -> Event:
        """Enqueue collectives as one call; returns the event of its end.

        Args:
            calls: The checked calls.
            ordered: Whether the stream is behind the work that they depend on already.
        """
        with self.enqueuing(ordered):
            with self._lock:  # no thread may abort it meanwhile
                operators = self._enqueue(calls)
            self._settle("enqueue a call")
            with self._lock:
                self._destroy(operators)
            arrays = [array for each in calls for array in (each.x, each.out)]
            ended: Event = self.stream.hold(*arrays)
            self._order.last = self.stream, ended
            return ended

    def _enqueue(self, calls: Sequence[PreparedOnDevice]) -> list[int]:
        """Make the calls; returns the operators that were made for them."""
        if self.aborted or self._finalized is not None:
            self._check()
            raise ClosedError(f"{self.where}: the communicator was aborted, or is being closed")
        try:
            operators = [self._operator(each.call, each.factor) for each in calls]
            with _group() if len(calls) > 1 else nullcontext():
                for each, op in zip(calls, operators, strict=True):
                    start = _CALLS[each.call.collective]
                    start(self, each.call, _address(each.x), _address(each.out), op)
        except api.NCCLError as error:
            raise InternalError(
                f"{self.where}: NCCL refused {calls[0].call}: {error} ({self._last_error()})"
            ) from None
        return [op for each, op in zip(calls, operators, strict=True) if each.factor != 1.0]

    def _destroy(self, operators: Sequence[int]) -> None:
        for op in operators:
            if not self.aborted:
                api.red_op_destroy(op, self.handle)

    def _operator(self, call: Call, factor: float) -> int:
        if factor == 1.0:
            return library.operator(call.op)
        share = factor / self.size if call.op == "mean" else factor
        return library.scaled_sum(self.handle, call.dtype, share)

    def finalize(self) -> None:
        """Begin to leave: NCCL sends what other members still await. All calls must be complete.

        Does not block. NCCL waits in the background for the other members to finalize, too: call
        this for all members of this process before the first `close`.
        """
        with self._lock:
            if not self.aborted and self._finalized is None:
                self._finalized = time.monotonic()
                if not self._call("finalize", lambda: api.comm_finalize(self.handle)):
                    self.abort()

    def close(self) -> None:
        """Leave; waits a while for the other members if `finalize` was called.

        Source: NCCL's user guide, ncclCommFinalize and ncclCommDestroy: only after the former has
        ended, the latter does not wait for other members.
        """
        if self._finalized is not None:
            until = self._finalized + _FINALIZE_SECONDS
            while (status := self.status()) == "InProgress" and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
            if not status:
                self._end("leave", lambda: api.comm_destroy(self.handle))
        self.abort()  # unless it has ended

    def abort(self) -> None:
        """Free whoever is stuck in it; no further call is made."""
        self._end("abort", lambda: api.comm_abort(self.handle))

    def _end(self, what: str, end: Callable[[], object]) -> None:
        with self._lock:
            if not self.aborted and getattr(self.device, "usable", True):
                self.aborted = True
                self._call(what, end)

    def _call(self, what: str, function: Callable[[], object]) -> bool:
        """Call a function of NCCL's; logs an error, as of a lost GPU: others have to end, too."""
        try:
            self._enter()
            function()
        except Exception as error:
            logger.warning("%s: NCCL could not %s: %r", self.where, what, error)
            return False
        return True


def _address(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


Enqueue = Callable[[NcclMember, Call, int, int, int], None]


def _all_reduce(member: NcclMember, call: Call, x: int, out: int, op: int) -> None:
    kind, times = library.datatype(call)
    api.all_reduce(x, out, call.count * times, kind, op, member.handle, member.stream.address)


def _reduce(member: NcclMember, call: Call, x: int, out: int, op: int) -> None:
    kind, times = library.datatype(call)
    api.reduce(
        *(x, out or x, call.count * times, kind, op, call.root, member.handle),
        member.stream.address,
    )


def _broadcast(member: NcclMember, call: Call, x: int, out: int, _: int) -> None:
    kind, times = library.datatype(call)
    api.broadcast(
        *(x, out, call.count * times, kind, call.root, member.handle, member.stream.address)
    )


def _all_gather(member: NcclMember, call: Call, x: int, out: int, _: int) -> None:
    kind, times = library.datatype(call)
    handle, stream = member.handle, member.stream.address
    if call.counts is None:
        api.all_gather(x, out, call.count * times, kind, handle, stream)
        return
    with _group():
        for root, (count, offset) in enumerate(_parts(call, member.size)):
            api.broadcast(x, out + offset, count * times, kind, root, handle, stream)


def _reduce_scatter(member: NcclMember, call: Call, x: int, out: int, op: int) -> None:
    kind, times = library.datatype(call)
    handle, stream = member.handle, member.stream.address
    if call.counts is None:
        api.reduce_scatter(x, out, call.count * times, kind, op, handle, stream)
        return
    with _group():
        for root, (count, offset) in enumerate(_parts(call, member.size)):
            api.reduce(x + offset, out, count * times, kind, op, root, handle, stream)


def _gather(member: NcclMember, call: Call, x: int, out: int, _: int) -> None:
    kind, times = library.datatype(call)
    handle, stream, parts = member.handle, member.stream.address, _parts(call, member.size)
    with _group():
        api.send(x, parts[member.rank][0] * times, kind, call.root, handle, stream)
        for peer, (count, offset) in enumerate(parts if member.rank == call.root else []):
            api.recv(out + offset, count * times, kind, peer, handle, stream)


def _scatter(member: NcclMember, call: Call, x: int, out: int, _: int) -> None:
    kind, times = library.datatype(call)
    handle, stream, parts = member.handle, member.stream.address, _parts(call, member.size)
    with _group():
        for peer, (count, offset) in enumerate(parts if member.rank == call.root else []):
            api.send(x + offset, count * times, kind, peer, handle, stream)
        api.recv(out, parts[member.rank][0] * times, kind, call.root, handle, stream)


def _all_to_all(member: NcclMember, call: Call, x: int, out: int, _: int) -> None:
    kind, times = library.datatype(call)
    handle, stream = member.handle, member.stream.address
    with _group():
        for peer, (count, offset) in enumerate(_parts(call, member.size)):
            api.send(x + offset, count * times, kind, peer, handle, stream)
        for peer, (count, offset) in enumerate(_parts(call, member.size, call.receives)):
            api.recv(out + offset, count * times, kind, peer, handle, stream)


def _send(member: NcclMember, call: Call, x: int, _: int, __: int) -> None:
    kind, times = library.datatype(call)
    api.send(x, call.count * times, kind, call.root, member.handle, member.stream.address)


def _recv(member: NcclMember, call: Call, _: int, out: int, __: int) -> None:
    kind, times = library.datatype(call)
    api.recv(out, call.count * times, kind, call.root, member.handle, member.stream.address)


def _parts(call: Call, size: int, shares: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Return each member's number of elements, and where they begin, in bytes.

    Args:
        shares: The elements, if they are not those of `call.counts`.
    """
    shares, item = shares or call.shares(size), item_bytes(call.dtype)
    return [(count, item * first) for count, first in zip(shares, starts(shares), strict=True)]


@contextmanager
def _group() -> Iterator[None]:
    """Make several calls one; they begin at its end."""
    api.group_start()
    try:
        yield
    finally:
        api.group_end()


_CALLS: dict[str, Enqueue] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send": _send,
    "recv": _recv,
}
