"""Calls that consist of several: of plain data, scatter without `out`, all_to_all with counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.comm import objects
from allreduce.comm.arguments import checks
from allreduce.comm.arguments.arrays import borrow, borrow_out, dtype_named
from allreduce.comm.arguments.checks import Context, Options
from allreduce.comm.arguments.device_arrays import device_of
from allreduce.comm.arguments.prepare import result_shape
from allreduce.comm.core.work import Work
from allreduce.comm.dispatch import Dispatcher
from allreduce.errors import UnsupportedError, UsageError

_COUNTS = Options(call_text="all_to_all(..., counts=[...])")  # the exchange of counts


def of_objects(comm: Dispatcher, calls: Callable[..., Any], async_op: bool, *arguments: Any) -> Any:
    """Make a call of plain data.

    Args:
        calls: The function of `objects`, which has the name of the method of `Communicator`.
        arguments: Its arguments.
    """
    context = comm.context(calls.__name__)
    return comm.compound(context, functools.partial(calls, comm, context, *arguments), async_op)


def scatter(
    comm: Dispatcher, x: Any, root: Any, counts: Sequence[int] | None, out: Any, async_op: bool
) -> Any:
    """Make a scatter; see `Communicator.scatter`."""
    context = comm.context("scatter")
    options = _scatter_options(comm, context, x, root, counts)
    if out is not None:
        return comm.call(functools.partial(_scatter_into, comm, context, x, options, out), async_op)
    calls = functools.partial(_scatter_described, comm, context, x, options)
    return comm.compound(context, calls, async_op, "pass out= on all members")


def _scatter_options(
    comm: Dispatcher, context: Context, x: Any, root: Any, counts: Sequence[int] | None
) -> Options:
    """Check the arguments of a scatter besides the root's array.

    Raises:
        UsageError: A member that is not the root passes an array, or an argument is wrong.
    """
    root = checks.check_root(context, root)
    if x is not None and comm.rank != root:
        raise UsageError(
            f"{context.where} takes an array on its root only, which is "
            f"{comm.transport.called(root)}, but got {type(x).__name__} here: pass None, or name "
            "this member as the root on all"
        )
    return Options(
        root=root, counts=None if counts is None else checks.check_counts(context, counts)
    )


def _scatter_into(comm: Dispatcher, context: Context, x: Any, options: Options, out: Any) -> Work:
    """Start a scatter of which every member knows its share by `out`."""
    whole = None
    if comm.rank != options.root:
        share = out if device_of(context, out) else borrow_out(f"{context.where}: out", out)
        rows = len(share) if share.ndim else 1
        total = rows * comm.size if options.counts is None else sum(options.counts)
        whole = share.dtype, (total, *share.shape[1:])
    return comm.start("scatter", x, options, out, whole)


def _scatter_described(comm: Dispatcher, context: Context, x: Any, options: Options) -> Any:
    """Give every member the dtype and shape of the root's array, and then its share.

    A root that has none, or none that can be carried, sends the others its error, and raises it.
    """
    found: list[Any] = []
    if comm.rank == options.root:
        try:
            if device_of(context, x) is not None:
                raise UnsupportedError(
                    f"{context.where}: the others cannot know on which device their shares are to "
                    "lie; pass out= on all members"
                )
            array = borrow(context.where, x, "takes an array on its root").array
            checks.check_op(context, None, array.dtype)
            found = ["", str(array.dtype), list(array.shape)]
        except (UsageError, UnsupportedError) as failure:
            found = ["unsupported" if isinstance(failure, UnsupportedError) else "usage"]
            found.append(str(failure))
    failed, *found = objects.broadcast_object(comm, context, found, options.root)
    if failed:
        raise (UnsupportedError if failed == "unsupported" else UsageError)(found[0])
    whole = dtype_named(found[0]), tuple(found[1])
    return comm.step("scatter", x, options, None, whole)


def all_to_all(comm: Dispatcher, x: Any, counts: Sequence[int], out: Any, async_op: bool) -> Any:
    """Make an all_to_all with counts; see `Communicator.all_to_all`."""
    context = comm.context("all_to_all")
    # Check all but the shape of `out` before the exchange of counts involves the others.
    device = device_of(context, x)
    rows = borrow(context.where, x).array if device is None else device.view(x)
    counts = checks.check_counts(context, counts)
    result_shape(context, tuple(rows.shape), Options(counts=counts))
    return comm.compound(
        context, functools.partial(_exchange_unequal, comm, x, counts, out), async_op
    )


def _exchange_unequal(comm: Dispatcher, x: Any, counts: Sequence[int], out: Any) -> Any:
    received = comm.step("all_to_all", np.array(counts, np.int64), _COUNTS)
    options = Options(counts=counts, receives=received.tolist())
    return comm.step("all_to_all", x, options, out)
