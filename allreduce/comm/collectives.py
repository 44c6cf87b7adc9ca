"""The calls of a communicator, as users see them: collectives, messages and plain data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.comm import checks, objects
from allreduce.comm.arguments import result_shape
from allreduce.comm.arrays import borrow
from allreduce.comm.base import Work
from allreduce.comm.call import ANY, OPERATORS
from allreduce.comm.caller import Caller
from allreduce.comm.checks import UNSCALED, Options
from allreduce.comm.quick import quick

_COUNTS = Options(typed="all_to_all(..., counts=[...])")  # the exchange of these

_REDUCING = OPERATORS[1:]  # all but "none"


class Collectives(Caller):
    """Collective calls over `size` members; every member makes the same calls in one order.

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

    @quick(_REDUCING, "sum")
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

    @quick(_REDUCING, "sum")
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

    @quick(_REDUCING, "sum")
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

    @quick()
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
        context = self._context("scatter")
        options = objects.scatter_options(self, context, x, root, counts)
        if out is not None:
            begin = functools.partial(objects.scatter_into, self, context, x, options, out)
            return self._call(begin, async_op)
        calls = functools.partial(objects.scatter, self, context, x, options)
        return self._compound(context, calls, async_op, "pass out= on all members")

    @quick()
    def broadcast(self, x: Any, *, root: int = 0, out: Any = None, async_op: bool = False) -> Any:
        """Give every member the root's array, or list of arrays.

        The others pass any arrays of that shape and dtype; `out` may be `x`.
        """
        return self._finish("broadcast", x, Options(root=root), out, async_op)

    @quick()
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
        context = self._context("all_to_all")
        # What is wrong is raised before the others hear of it, but for an `out` that does not fit.
        rows = borrow(context.where, x).array
        counts = checks.check_counts(context, counts)
        result_shape(context, rows.shape, Options(counts=counts))
        calls = functools.partial(_exchange_unequal, self, x, counts, out)
        return self._compound(context, calls, async_op)

    @quick()
    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait until all members have called."""
        finished: Work | None = self._call(self._meet, async_op)
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
        return self._call(functools.partial(self._send, x, dest, tag), async_op)

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
        return self._call(functools.partial(self._receive, out, source, tag), async_op)

    def broadcast_object(self, value: Any = None, *, root: int = 0, async_op: bool = False) -> Any:
        """Give every member the root's plain data; the others' is ignored."""
        context = self._context("broadcast_object")
        calls = functools.partial(objects.broadcast, self, context, value, root)
        return self._compound(context, calls, async_op)

    def gather_object(self, value: Any, *, root: int = 0, async_op: bool = False) -> Any:
        """Give the root a list of every member's plain data, by rank; the others get None."""
        context = self._context("gather_object")
        calls = functools.partial(objects.gather, self, context, value, root)
        return self._compound(context, calls, async_op)

    def all_gather_object(self, value: Any, *, async_op: bool = False) -> Any:
        """Give every member a list of every member's plain data, by rank."""
        context = self._context("all_gather_object")
        calls = functools.partial(objects.all_gather, self, context, value)
        return self._compound(context, calls, async_op)

    def _finish(self, collective: str, x: Any, options: Options, out: Any, async_op: bool) -> Any:
        begin: Callable[..., Work] = self._start
        if isinstance(x, list | tuple):
            from allreduce.comm import lists  # which few programs use

            begin = functools.partial(lists.start, self)
        return self._call(functools.partial(begin, collective, x, options, out), async_op)


def _exchange_unequal(comm: Caller, x: Any, counts: Sequence[int], out: Any) -> Any:
    received = comm._next("all_to_all", np.array(counts, np.int64), _COUNTS)
    options = Options(counts=counts, receives=received.tolist())
    return comm._next("all_to_all", x, options, out)


def _factors(prescale: Any, postscale: Any) -> tuple[Any, Any]:
    """Return `UNSCALED` for two ones, which need no way of their own; others are checked later."""
    ones = all(type(factor) in (int, float) and factor == 1 for factor in (prescale, postscale))
    return UNSCALED if ones else (prescale, postscale)
