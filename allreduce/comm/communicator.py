"""A communicator: collectives, messages and plain data among a fixed set of members."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from allreduce.comm import objects
from allreduce.comm.arguments import checks
from allreduce.comm.arguments.arrays import borrow
from allreduce.comm.arguments.checks import UNSCALED, Options
from allreduce.comm.arguments.prepare import prepare, result_shape
from allreduce.comm.calls.call import ANY, OPERATORS
from allreduce.comm.calls.plan import Plan
from allreduce.comm.core import lifecycle
from allreduce.comm.core.transport import Transport, Work
from allreduce.comm.dispatch import Dispatcher, fast_path
from allreduce.comm.group_factory import GroupFactory, several_per_process
from allreduce.errors import OutOfMemoryError, UsageError, everywhere

_FIXED = frozenset({"rank", "size", "local_rank", "local_size", "transport"})
_COUNTS = Options(call_text="all_to_all(..., counts=[...])")  # the exchange of these
_REDUCING = OPERATORS[1:]  # all but "none"


class Communicator:
    """Orders collective calls over its members; every member makes the same calls in one order.

    Collectives take NumPy arrays, arrays on the CPU of libraries that speak DLPack (PyTorch, JAX),
    and Python numbers, and give back the same kind. With `async_op=True` they return a `Work` at
    once; the arrays belong to it until its `wait()` returns. Threads may share a communicator, if
    they start their calls in one order on all members. Results are the same on all members;
    on the shared transport sums are added in the order of members, so they are bitwise the same
    from run to run, too.

    After an error a communicator is dead on all members: each call raises `ClosedError`, which
    repeats the cause.

    Common arguments:
        x: The contribution, as `Communicator` describes; equal in shape and dtype on all members
            unless said otherwise. Lists of arrays go as one call where that is said.
        op: "sum", "mean", "min", "max", "prod", "logical_and", "logical_or", "bitwise_and",
            "bitwise_or" or "bitwise_xor".
        prescale, postscale: Factors before and after a sum or mean of floating-point or complex
            arrays; the same on all members.
        root: The member that gives or gets; the others' results are None.
        counts: Rows of every member's share, the same list on all members; equal shares without it.
        out: Where the result goes; it may be `x` itself, or where rows are joined or cut the array
            that has the shorter one as this member's own rows, but overlap it in no other way. A
            new array without it. Ignored where there is no result.
        async_op: Return a `Work` without waiting. A call that consists of several cannot: a
            `scatter` without `out`, an `all_to_all` with `counts`, and those of plain data.
        value: Plain Python data: numbers, strings, bytes, None, and lists and dicts of them.
            Nothing is pickled; tuples arrive as lists, and NumPy's numbers as Python's.

    Raises:
        UsageError, UnsupportedError: An argument is wrong; ShapeError if only its shape is.
        MismatchError: Members made different calls; no output is touched.
        PeerLostError: A member died, left or gave up.
        TimeoutError: Members did not come in time.
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
        self._dispatch = Dispatcher(transport, name=name, label=label, rank=rank, size=size)
        self._groups: GroupFactory[Communicator] | None = None  # set by open_members
        self._closer = threading.Lock()  # acquired, and never released, by the first `close`

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(f"{self._dispatch.where}: {name} is what it is, and cannot be set")
        super().__setattr__(name, value)

    @property
    def name(self) -> str:
        """What messages call it; the same on all members, and no other communicator's."""
        return self._dispatch.name

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._dispatch.closed

    @property
    def dead(self) -> bool:
        """Whether an error has ended it."""
        return self._dispatch.transport.dead

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ", dead" if self.dead else ""
        return f"<Communicator {self.name!r}: {self.rank} of {self.size}, {self.transport}{state}>"

    @fast_path(_REDUCING, "sum")
    def all_reduce(
        self,
        x: Any,
        *,
        op: str = "sum",
        prescale: complex = 1.0,
        postscale: complex = 1.0,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Combine the members' arrays element by element; every member gets the result.

        `x` may be a list of arrays; `out` and the result are such lists then.
        """
        options = Options(op, scale=_factors(prescale, postscale))
        return self._finish("all_reduce", x, options, out, async_op)

    @fast_path(_REDUCING, "sum")
    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: str = "sum",
        prescale: complex = 1.0,
        postscale: complex = 1.0,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Combine the members' arrays (or lists of them) element by element, for the root."""
        options = Options(op, root, scale=_factors(prescale, postscale))
        return self._finish("reduce", x, options, out, async_op)

    @fast_path(_REDUCING, "sum")
    def reduce_scatter(
        self,
        x: Any,
        *,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        prescale: complex = 1.0,
        postscale: complex = 1.0,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Combine the members' arrays `(rows, ...)`; every member gets its share of the rows."""
        options = Options(op, counts=counts, scale=_factors(prescale, postscale))
        return self._finish("reduce_scatter", x, options, out, async_op)

    @fast_path()
    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Join the members' arrays along axis 0, in member order; every member gets all.

        `x` is `(rows, ...)`, with `counts[rank]` rows where these are given; a number is one row.
        """
        return self._finish("all_gather", x, Options(counts=counts), out, async_op)

    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Join the members' arrays along axis 0, in member order, for the root."""
        return self._finish("gather", x, Options(root=root, counts=counts), out, async_op)

    def scatter(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Cut the root's array `(rows, ...)` along axis 0; every member gets its share.

        The others pass None for `x`. Pass `out` on all members or on none: without it, the root
        first sends them the dtype and shape of its array, so the call cannot be asynchronous.

        Raises:
            UsageError: A member that is not the root passes an array.
            UnsupportedError: `async_op` without `out`.
        """
        context = self._dispatch.context("scatter")
        options = objects.scatter_options(self._dispatch, context, x, root, counts)
        if out is not None:
            begin = functools.partial(
                objects.scatter_into, self._dispatch, context, x, options, out
            )
            return self._dispatch.call(begin, async_op)
        calls = functools.partial(objects.scatter, self._dispatch, context, x, options)
        return self._dispatch.compound(context, calls, async_op, "pass out= on all members")

    @fast_path()
    def broadcast(self, x: Any, *, root: int = 0, out: Any = None, async_op: bool = False) -> Any:
        """Give every member the root's array, or list of arrays.

        The others pass any arrays of that shape and dtype; `out` may be `x`.
        """
        return self._finish("broadcast", x, Options(root=root), out, async_op)

    @fast_path()
    def all_to_all(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Give every member its share of the rows of `x`, and join what all gave to this one.

        `counts` are the rows for each member, and may differ between members: they exchange them
        first, so the call cannot be asynchronous.
        """
        if counts is None or isinstance(x, list | tuple):
            return self._finish("all_to_all", x, Options(counts=counts), out, async_op)
        context = self._dispatch.context("all_to_all")
        # What is wrong is raised before the others hear of it, but for an `out` that does not fit.
        rows = borrow(context.where, x).array
        counts = checks.check_counts(context, counts)
        result_shape(context, rows.shape, Options(counts=counts))
        calls = functools.partial(_exchange_unequal, self._dispatch, x, counts, out)
        return self._dispatch.compound(context, calls, async_op)

    @fast_path()
    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait until all members have called."""
        finished: Work | None = self._dispatch.call(self._dispatch.meet, async_op)
        return finished

    def send(self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Give one member an array or number, which it takes by a `recv` of its own.

        Only these two take part: sends and recvs have no place in the order of the collectives. A
        recv takes the messages of one member in the order in which they were sent. A small message
        may be on its way when this returns, a large one has been taken by a recv.

        Args:
            dest: The member that gets it; it may be this one, whose recv then has to be started,
                or this send, with `async_op`.
            tag: A number from 0 that tells messages apart.

        Raises:
            MismatchError: The recv that takes it has another dtype or number of elements.
        """
        return self._dispatch.call(functools.partial(self._dispatch.send, x, dest, tag), async_op)

    def recv(self, out: Any, source: int = ANY, tag: int = ANY, *, async_op: bool = False) -> Any:
        """Receive into `out`, which is returned, the first message that fits source and tag.

        Args:
            out: A writable array of the message's dtype and number of elements; the shape is free.
            source: The member that it comes from, or `ANY`.
            tag: The message's tag, or `ANY`.
            async_op: Return a `Receive`, whose `source` and `tag` tell after its wait which
                message it was.

        Raises:
            MismatchError: The message has another dtype or number of elements.
        """
        return self._dispatch.call(
            functools.partial(self._dispatch.receive, out, source, tag), async_op
        )

    def broadcast_object(self, value: Any = None, *, root: int = 0, async_op: bool = False) -> Any:
        """Give every member the root's plain data; the others' is ignored."""
        context = self._dispatch.context("broadcast_object")
        calls = functools.partial(objects.broadcast, self._dispatch, context, value, root)
        return self._dispatch.compound(context, calls, async_op)

    def gather_object(self, value: Any, *, root: int = 0, async_op: bool = False) -> Any:
        """Give the root a list of every member's plain data, by rank; the others get None."""
        context = self._dispatch.context("gather_object")
        calls = functools.partial(objects.gather, self._dispatch, context, value, root)
        return self._dispatch.compound(context, calls, async_op)

    def all_gather_object(self, value: Any, *, async_op: bool = False) -> Any:
        """Give every member a list of every member's plain data, by rank."""
        context = self._dispatch.context("all_gather_object")
        calls = functools.partial(objects.all_gather, self._dispatch, context, value)
        return self._dispatch.compound(context, calls, async_op)

    def split(
        self, color: int | None, key: int = 0, *, transport: str | None = None
    ) -> Communicator | None:
        """Make a communicator for each color, of the members that named it; a collective call.

        What is made belongs to the caller, who closes it; parents and parts are closed in any
        order.

        Args:
            color: Members that name the same number come together; None for no part.
            key: Members of a part are numbered by key, then by rank here.
            transport: What carries the parts' calls; as here without it. The same on all members.

        Returns:
            This member's part, or None without a color.

        Raises:
            MismatchError: Members name different transports.
            UnsupportedError: Members are replicas of which a process may have several.
        """
        return self._factory("split").split(color, key, transport)

    def group(self, ranks: Sequence[int], *, transport: str | None = None) -> Communicator | None:
        """Make a communicator of some members; a collective call of these alone.

        Others may call, too, and get None at once: where every rank makes the same list of groups,
        each gets its own ones.

        Args:
            ranks: The members, by their ranks here, in the order of their ranks there; the same on
                all of them.
            transport: What carries its calls; as here without it. The same on all of them.

        Raises:
            UsageError: There is no such rank, or one comes twice.
            MismatchError: Members name different transports.
            TimeoutError: A member did not come, or waits in another group; the message names it.
            PeerLostError: A member has died.
            UnsupportedError: Members are replicas of which a process may have several.
        """
        return self._factory("group").group(ranks, transport)

    @property
    def local(self) -> Communicator:
        """The members on this member's host; closed with this communicator.

        Made when it is first asked for: that is a collective call of its members.
        """
        return self._factory("local").local()

    @property
    def across(self) -> Communicator:
        """One member per host: those with this member's place on their hosts; closed with this.

        Made when it is first asked for: that is a collective call of its members. Hosts with fewer
        members have none in the lanes of the last places.
        """
        return self._factory("across").across()

    def _factory(self, call: str) -> GroupFactory[Communicator]:
        if self._groups is None:
            raise several_per_process(self._dispatch.where, call)
        return self._groups

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
        transport = self._dispatch.transport
        lengths, kind = checks.check_empty(self._dispatch.context("empty"), shape, dtype)
        nbytes = math.prod(lengths) * kind.itemsize

        def allocate() -> NDArray[Any]:
            if self.size > 1:
                self._dispatch.meet(f"empty({lengths}, dtype={str(kind)!r})").wait()
            try:
                return transport.empty(nbytes)
            except OutOfMemoryError as error:
                everywhere(error)
                raise

        with transport.uninterrupted("a call"):
            part = self._dispatch.exclusively(allocate)
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
        return planning.describe(
            self._dispatch.context(collective), self._dispatch.transport, x, given
        )

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
        context = self._dispatch.context("all_reduce")
        checks.check_stays(context, x=x, out=out)
        ready = prepare(context, x, Options(op), out)
        start = self._dispatch.transport.bind(ready.call, ready.x, ready.out, ready.result)

        def begin() -> Work:
            self._dispatch.check_open()
            in_order = functools.partial(self._dispatch.in_order, context, start)
            work: Work = self._dispatch.call(in_order, True)
            return work

        return begin

    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        """Make the communicator dead on all members; theirs raise an error with our rank and this.

        Args:
            reason: What happened, for the others' messages; about 250 bytes of it are kept.
            interrupted: Whether an interrupt such as Ctrl-C is the cause, as the others'
                `PeerLostError.interrupted` tells.
        """
        self._dispatch.transport.abort(reason, interrupted=interrupted)

    def close(self) -> None:
        """Complete what was started, and leave; `local` and `across`, too.

        But a recv that another thread waits for, and whose message has not come, ends by a
        `ClosedError`. Not collective: the others may go on without us, until they need us.
        """
        self._close(drain=True)

    def _close(self, drain: bool) -> None:
        first = self._closer.acquire(blocking=False)
        dispatch = self._dispatch
        dispatch.closed, dispatch.fast_path = True, None
        with contextlib.ExitStack() as stack:  # all of them, whichever fails
            stack.callback(lifecycle.remove, dispatch.transport)
            for group in self._groups.cached if self._groups is not None else ():
                if not group.closed:
                    stack.callback(group._close, drain)
            if self._groups is not None and first:
                stack.callback(self._groups.part.leave)
            stack.callback(dispatch.transport.close, drain)
            if drain and not dispatch.transport.dead:
                stack.callback(self._finish_compound)

    def _finish_compound(self) -> None:
        """Wait until no other thread is in a call that consists of several."""
        with contextlib.suppress(UsageError):  # of a thread or process that must not call
            self._dispatch.exclusively(lambda: None)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._close(drain=error is None)

    def _finish(self, collective: str, x: Any, options: Options, out: Any, async_op: bool) -> Any:
        begin: Callable[..., Work] = self._dispatch.start
        if isinstance(x, list | tuple):
            from allreduce.comm import lists  # which few programs use

            begin = functools.partial(lists.start, self._dispatch)
        return self._dispatch.call(functools.partial(begin, collective, x, options, out), async_op)


def _exchange_unequal(dispatch: Dispatcher, x: Any, counts: Sequence[int], out: Any) -> Any:
    received = dispatch.step("all_to_all", np.array(counts, np.int64), _COUNTS)
    options = Options(counts=counts, receives=received.tolist())
    return dispatch.step("all_to_all", x, options, out)


def _factors(prescale: Any, postscale: Any) -> tuple[Any, Any]:
    """Return `UNSCALED` for two ones, which need no way of their own; others are checked later."""
    ones = all(type(factor) in (int, float) and factor == 1 for factor in (prescale, postscale))
    return UNSCALED if ones else (prescale, postscale)
