"""From a caller's question, what would this call do, to the transport's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from allreduce.comm import lists, messages, typed
from allreduce.comm.arguments import Prepared, prepare
from allreduce.comm.arrays import borrow
from allreduce.comm.base import Transport
from allreduce.comm.call import ANY, ROOTED, Call
from allreduce.comm.checks import Context, Options
from allreduce.comm.plan import Plan
from allreduce.errors import UsageError, unknown_name
from allreduce.events import counted

_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_KNOWN = (*_REDUCING, *("all_gather", "gather", "scatter", "broadcast", "all_to_all"))


def describe(
    context: Context,
    transport: Transport,
    x: Any,
    options: Options,
    out: Any = None,
    peer: int | None = None,
) -> Plan:
    """Plan a call with the arguments that it would get.

    Args:
        context: Which member asks about which collective.
        transport: What would carry it.
        x: What the collective takes; of scatter the root's array, on all; of recv its output.
        options: Its options.
        out: Where its result would go.
        peer: The other member of a message.

    Raises:
        UsageError: An argument is wrong, as for the call itself.
    """
    name = context.collective
    if name not in (*_KNOWN, "barrier", "send", "recv"):
        raise unknown_name("collective", name, (*_KNOWN, "barrier", "send", "recv"))
    options = _completed(context, options)
    if name == "barrier":
        return transport.plan(Call("barrier", None, "none", 0, None, context.group), None, None)
    if name == "send":
        return _plan(transport, messages.prepare_send(context, x, peer, 0), "")
    if name == "recv":
        return _plan(
            transport, messages.prepare_recv(context, x, ANY if peer is None else peer, ANY), ""
        )
    if isinstance(x, list | tuple):
        return _describe_list(context, transport, x, options)
    array = borrow(context.where, x).array
    whole = None
    if name == "scatter" and context.rank != options.root:
        x, whole = None, (array.dtype, array.shape)
    said = typed.of_array(name, array.dtype, array.shape, options, always=True)
    return _plan(transport, prepare(context, x, options, out, whole), said)


def _completed(context: Context, options: Options) -> Options:
    """Give what was left out its default, and refuse what the collective does not take."""
    name = context.collective
    if options.op is not None and name not in _REDUCING:
        raise UsageError(f"{context.where} takes no operator, but got op={options.op!r}")
    if name == "all_to_all" and options.counts is not None and options.receives is None:
        raise UsageError(
            f"{context.where} with counts takes receives, too, to be planned: the rows that this "
            "rank gets from each"
        )
    if name in _REDUCING and options.op is None:
        options = replace(options, op="sum")
    if name in ROOTED and options.root is None:
        options = replace(options, root=0)
    return options


def _describe_list(
    context: Context, transport: Transport, x: Sequence[Any], options: Options
) -> Plan:
    """Plan a list of arrays: a call for each dtype."""
    arrays = lists.arrays_of(context, x, options)
    parts = []
    for positions in lists.by_dtype(arrays):
        chosen = [arrays[i] for i in positions]
        flat = chosen[0]
        if len(chosen) > 1:  # its place in memory is that of no array, and it is never touched
            flat = np.empty(sum(array.size for array in chosen), chosen[0].dtype)
        parts.append(describe(context, transport, flat, options))
    steps = ("pack the arrays of each dtype into one", "make its call", "unpack the result")
    said = typed.of_list(context, arrays, options)
    how = f"{counted(len(parts), 'call')}, one per dtype,"
    return Plan(said, transport.name, how, steps, parts=tuple(parts))


def _plan(transport: Transport, ready: Prepared, said: str) -> Plan:
    made = transport.plan(ready.call, ready.x, ready.out)
    return replace(made, call=said) if said else made
