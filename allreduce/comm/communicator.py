"""A communicator: its life, and the way of a call to its transport."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import DTypeLike, NDArray

from allreduce.comm import checks, messages
from allreduce.comm.arguments import Prepared, prepare
from allreduce.comm.base import Transport, Work
from allreduce.comm.call import Call
from allreduce.comm.checks import Context, Options
from allreduce.comm.failures import group_text
from allreduce.comm.groups import Groups
from allreduce.comm.order import Order, Stages, of_one
from allreduce.comm.plan import Plan
from allreduce.comm.sites import place
from allreduce.errors import AllreduceError, ClosedError, OutOfMemoryError, everywhere

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
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.transport = transport.name
        self._name = name
        self._where = f"[{transport.name}] {group_text(name)}{label}"
        self._transport = transport
        self._quick = transport.quick()  # read by native methods
        self._closed = False
        self._placing = threading.Lock()
        self._here = threading.local()  # `starts`: whether this thread's call is behind its checks
        self._order = Order(transport, weakref.WeakMethod(self._hold))

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
        """Allocate an array in symmetric memory; a collective call.

        Collectives whose arrays (or slices) lie in such memory on every member copy nothing. Its
        content is undefined. It is freed with the last array that uses it; after the communicator
        has died it still can be read, but peers may have left anything in it.

        Raises:
            OutOfMemoryError: A member cannot have the memory; raised on all members.
            MismatchError: Members asked for different shapes or dtypes.
        """
        lengths, kind = checks.check_empty(self._context("empty"), shape, dtype)
        nbytes = math.prod(lengths) * kind.itemsize
        with self._order.alone(), self._transport.uninterrupted("a call"):
            if self.size > 1:
                self._meet(f"empty({lengths}, dtype={str(kind)!r})").wait()
            try:
                part = self._transport.empty(nbytes)
            except OutOfMemoryError as error:
                everywhere(error)
                raise
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
        self._closed = True
        self._quick = None
        with contextlib.ExitStack() as stack:  # all of them, whichever fails
            for part in (self._across, self._local):
                if part is not None and not part.closed:
                    stack.callback(part._close, drain)
            stack.callback(self._transport.close, drain)
            stack.callback(self._order.end)
            if drain and not self._transport.dead:
                stack.callback(self._order.reach, None)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._close(drain=error is None)

    def _admit(self) -> None:
        self._transport.admit()

    def _check_open(self) -> None:
        if self._closed:
            group = group_text(self._name)
            who = "the communicator that it came from" if group else "allreduce.init()"
            raise ClosedError(f"{self._where}: the communicator is closed; {who} makes a new one")

    def _finish_quick(self, work: object, x: Any) -> None:
        """Complete a call that the quick way left unfinished, or raise why it failed."""
        self._transport.finish_quick(work, x)

    def _interrupt_quick(self, kind: type[BaseException]) -> None:
        """End the communicator after a signal's handler raised in the middle of a quick call."""
        self._transport.abort(f"a collective was interrupted by {kind.__name__}")

    def _start(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Work:
        context = self._context(collective)
        ready = prepare(context, x, options, out, whole)
        start = self._transport.start
        return self._in_order(context, start, ready.call, ready.x, ready.out, ready.result)

    def _called(self, member: int) -> str:
        return self._transport.called(member)

    def _stage(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Work:
        context = self._calling(collective)  # also of one that close() waits for
        return self._begin(context, prepare(context, x, options, out, whole))

    def _staged(self, context: Context, stages: Stages, async_op: bool) -> Any:
        at = place()

        def begin() -> Work:
            self._here.starts = True
            return self._order.add(stages, context.where, at, attended=async_op)

        return self._call(begin, async_op)

    def _call(self, begin: Callable[[], Work], async_op: bool) -> Any:
        work: Work | None = None
        self._here.starts = False
        try:
            work = begin()
            return work if async_op else work.wait()
        except AllreduceError:
            raise
        except BaseException as error:  # a signal's handler raised, and nobody goes on with it
            # Without a work it may have started, unless the caller's array raised it before that.
            of_array = isinstance(error, Exception) and not self._here.starts
            if of_array if work is None else work.settled:
                raise
            self._transport.abort(f"a call was interrupted by {type(error).__name__}")
            raise

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return self._order.together()

    def _send(self, x: Any, dest: int, tag: int) -> Work:
        context = self._context("send")
        return self._begin(context, messages.prepare_send(context, x, dest, tag))

    def _meet(self, typed: str = "") -> Work:
        context = self._context(typed.partition("(")[0] or "barrier")
        call = Call("barrier", None, "none", 0, None, self._name, typed=typed)
        return self._in_order(context, self._transport.start, call, None, None, lambda: None)

    def _receive(self, out: Any, source: int, tag: int) -> Work:
        context = self._context("recv")
        work = self._begin(context, messages.prepare_recv(context, out, source, tag))
        return messages.Receive(work)

    def _in_order(self, context: Context, start: Callable[..., Work], *arguments: Any) -> Work:
        """Start a collective, after the calls in stages that were made before."""
        self._here.starts = True
        order = self._order
        with order.lock:
            if order.queue:
                stages = of_one(functools.partial(start, *arguments))
                return order.add(stages, context.where, place(), attended=False)
            order.settle()
            work = start(*arguments)
        work.where = context.where
        return work

    def _begin(self, context: Context, ready: Prepared) -> Work:
        """Start a message, which has no place in the order, or what has its turn."""
        self._here.starts = True
        work = self._transport.start(ready.call, ready.x, ready.out, ready.result)
        work.where = context.where
        return work

    def _hold(self, held: bool) -> None:
        """Have quick calls take the way of all, while there are others to start before them."""
        self._quick = None if held or self._closed else self._transport.quick()
        if self._closed:  # meanwhile
            self._quick = None

    def _context(self, collective: str) -> Context:
        self._check_open()
        return self._calling(collective)

    def _calling(self, collective: str) -> Context:
        return Context(collective, self._where, self._name, self.rank, self.size)
