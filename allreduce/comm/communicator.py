"""A communicator: what it is, and its life."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import DTypeLike, NDArray

from allreduce.comm import checks
from allreduce.comm.arguments import prepare
from allreduce.comm.base import Transport, Work
from allreduce.comm.checks import Options
from allreduce.comm.groups import Groups
from allreduce.comm.plan import Plan
from allreduce.errors import OutOfMemoryError, UsageError, everywhere

_FIXED = frozenset({"rank", "size", "local_rank", "local_size", "transport"})


class Communicator(Groups):
    """Orders collective calls over its members; every member makes the same calls in one order.

    Collectives take NumPy arrays, arrays on the CPU of libraries that speak DLPack (PyTorch, JAX),
    and Python numbers, and give back the same kind. With `async_op=True` they return a `Work` at
    once; the arrays belong to it until its `wait()` returns. Threads may share a communicator, if
    they start their calls in one order on all members. Results are the same on all members;
    on the shared transport sums are added in the order of members, so they are bitwise the same
    from run to run, too.

    After an error a communicator is dead on all members: each call raises `ClosedError`, which
    repeats the cause.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        name: str,
        label: str,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
    ) -> None:
        super().__init__(transport, name=name, label=label, rank=rank, size=size)
        self.local_rank = local_rank
        self.local_size = local_size
        self.transport = transport.name
        self._placing = threading.Lock()
        self._closer = threading.Lock()  # taken for good by who closes first

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(f"{self._where}: {name} is what it is, and cannot be set")
        super().__setattr__(name, value)

    @property
    def name(self) -> str:
        """What messages call it; the same on all members, and no other communicator's."""
        return self._name

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    @property
    def dead(self) -> bool:
        """Whether an error has ended it."""
        return self._transport.dead

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ", dead" if self.dead else ""
        return f"<Communicator {self._name!r}: {self.rank} of {self.size}, {self.transport}{state}>"

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """Allocate an array of zeros in symmetric memory; a collective call.

        Collectives whose arrays (or slices) lie in such memory on every member copy nothing. It is
        freed with the last array that uses it. After the communicator has died it can still be
        read and written, and no other member changes it any more; what the failed calls left in
        their outputs is undefined.

        Raises:
            OutOfMemoryError: A member cannot have the memory; raised on all members.
            MismatchError: Members asked for different shapes or dtypes.
        """
        lengths, kind = checks.check_empty(self._context("empty"), shape, dtype)
        nbytes = math.prod(lengths) * kind.itemsize

        def allocate() -> NDArray[Any]:
            if self.size > 1:
                self._meet(f"empty({lengths}, dtype={str(kind)!r})").wait()
            try:
                return self._transport.empty(nbytes)
            except OutOfMemoryError as error:
                everywhere(error)
                raise

        with self._transport.uninterrupted("a call"):
            part = self._together(allocate)
        return part[:nbytes].view(kind).reshape(lengths)

    def plan(
        self,
        collective: str,
        x: Any = None,
        *,
        op: str | None = None,
        prescale: complex | None = None,
        postscale: complex | None = None,
        root: int | None = None,
        counts: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
        out: Any = None,
        dest: int | None = None,
        source: int | None = None,
        tag: int | None = None,
    ) -> Plan:
        """Say what a call would do here, without making it: not a collective call. Print it.

        Args:
            collective: "all_reduce", "broadcast", "barrier", "send", ...
            x: What the call would take: the way it goes depends on its size, type and memory. Of
                scatter the root's array, on every rank; of recv the array it would receive into.
            op: The operator; "sum" where one is needed.
            prescale, postscale, root, counts, dest, source, tag: As for the call.
            receives: Of all_to_all with counts: the rows that this rank would get from each.
            out: As for the call; a new array without it.

        Raises:
            UsageError, UnsupportedError: As the call itself would.
        """
        from allreduce.comm import planning  # which few programs use

        given: dict[str, Any] = {
            "op": op,
            "prescale": prescale,
            "postscale": postscale,
            "root": root,
        }
        given |= {"counts": counts, "receives": receives, "out": out}
        given |= {"dest": dest, "source": source, "tag": tag}
        return planning.describe(self._context(collective), self._transport, x, given)

    def all_reduce_init(
        self, x: NDArray[Any], *, op: str = "sum", out: NDArray[Any]
    ) -> Callable[[], Work]:
        """Prepare an all_reduce of the same arrays in every step; not a collective call.

        Each call of what it returns is an `all_reduce(x, op=op, out=out, async_op=True)`, with the
        checks done beforehand; before the next one, wait for its work. Between the matrix products
        of a training step, which leave little in the caches, a start took 50 us instead of 320.

        Source: MPI 4.0, section 6.13, persistent collective operations.

        Raises:
            UsageError: An array is not NumPy's, or not contiguous.
        """
        context = self._context("all_reduce")
        checks.check_stays(context, x=x, out=out)
        ready = prepare(context, x, Options(op), out)
        start = self._transport.bind(ready.call, ready.x, ready.out, ready.result)

        def begin() -> Work:
            self._check_open()
            work: Work = self._call(functools.partial(self._in_order, context, start), True)
            return work

        return begin

    def abort(self, reason: str) -> None:
        """Make the communicator dead on all members; theirs raise an error with our rank and this.

        Args:
            reason: What happened, for the others' messages; about 250 bytes of it are kept.
        """
        self._transport.abort(reason)

    def close(self) -> None:
        """Complete what was started, and leave; `local` and `across`, too.

        But a recv that another thread waits for, and whose message has not come, ends by a
        `ClosedError`. Not collective: the others may go on without us, until they need us.
        """
        self._close(drain=True)

    def _close(self, drain: bool) -> None:
        first = self._closer.acquire(blocking=False)
        self._closed = True
        self._quick = None
        with contextlib.ExitStack() as stack:  # all of them, whichever fails
            for part in (self._across, self._local):
                if part is not None and not part.closed:
                    stack.callback(part._close, drain)
            if self._home is not None and first:
                stack.callback(self._home.room.leave)
            stack.callback(self._transport.close, drain)
            if drain and not self._transport.dead:
                stack.callback(self._finish_compound)

    def _finish_compound(self) -> None:
        """Wait until no other thread is in a call that consists of several."""
        with contextlib.suppress(UsageError):  # of a thread or process that must not call
            self._together(lambda: None)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._close(drain=error is None)
