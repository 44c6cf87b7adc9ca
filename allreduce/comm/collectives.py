"""The collectives, as callers see them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.comm import checks, objects
from allreduce.comm.arguments import result_shape
from allreduce.comm.arrays import borrow
from allreduce.comm.base import Work
from allreduce.comm.call import OPERATORS
from allreduce.comm.checks import UNSCALED, Options
from allreduce.comm.objects import Objects
from allreduce.comm.point_to_point import PointToPoint
from allreduce.comm.quick import quick
from allreduce.comm.stages import Stages, as_it_is

_COUNTS = Options(typed="all_to_all(..., counts=[...])")  # the exchange of these

_REDUCING = OPERATORS[1:]  # all but "none"


class Collectives(PointToPoint, Objects):
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
        async_op: Return a `Work` without waiting.

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

        The others pass None, and learn of the array's shape and dtype first: where `counts` or
        `out` do not fit these, the wait raises that.

        Raises:
            UsageError: A member that is not the root passes an array.
        """
        context = self._context("scatter")
        stages = objects.scatter(self, context, x, root, counts, out)
        return self._staged(context, stages, async_op)

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
        first.
        """
        if counts is None or isinstance(x, list | tuple):
            return self._finish("all_to_all", x, Options(counts=counts), out, async_op)
        context = self._context("all_to_all")
        # What is wrong is raised before the others hear of it, but for an `out` that does not fit.
        rows = borrow(context.where, x).array
        counts = checks.check_counts(context, counts)
        result_shape(context, rows.shape, Options(counts=counts))
        return self._staged(context, _unequal_exchange(self, x, counts, out), async_op)

    @quick()
    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait until all members have called."""
        finished: Work | None = self._call(self._meet, async_op)
        return finished

    def _finish(self, collective: str, x: Any, options: Options, out: Any, async_op: bool) -> Any:
        if isinstance(x, list | tuple):
            from allreduce.comm.lists import start  # which few programs use
        elif options.scale is not UNSCALED:
            from allreduce.comm.pieces import start
        else:
            begin = functools.partial(self._start, collective, x, options, out)
            return self._call(begin, async_op)
        given = (self, collective, x, options, out, async_op)
        return self._call(functools.partial(start, *given), async_op)


def _unequal_exchange(comm: Collectives, x: Any, counts: Sequence[int], out: Any) -> Stages:
    received: Any = yield comm._stage("all_to_all", np.array(counts, np.int64), _COUNTS)
    options = Options(counts=counts, receives=received.tolist())
    return comm._stage("all_to_all", x, options, out), as_it_is


def _factors(prescale: Any, postscale: Any) -> tuple[Any, Any]:
    """Return `UNSCALED` for two ones, which need no way of their own; others are checked later."""
    ones = all(type(factor) in (int, float) and factor == 1 for factor in (prescale, postscale))
    return UNSCALED if ones else (prescale, postscale)
