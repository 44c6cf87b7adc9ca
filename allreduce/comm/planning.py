"""From a caller's question, what would this call do, to the transport's plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allreduce.comm import messages
from allreduce.comm.arguments import Prepared, prepare
from allreduce.comm.arrays import borrow
from allreduce.comm.base import Transport
from allreduce.comm.call import ROOTED, Call
from allreduce.comm.checks import Context, Options
from allreduce.comm.plan import Plan
from allreduce.errors import UsageError, unknown_name

_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_KNOWN = (*_REDUCING, *("all_gather", "gather", "scatter", "broadcast", "all_to_all"))


def describe(context: Context, transport: Transport, x: Any, options: Options, out: Any) -> Plan:
    """Plan a call with the arguments that it would get.

    Args:
        context: Which member asks about which collective.
        transport: What would carry it.
        x: What the collective takes; of scatter the root's array, on all; of recv its output.
        options: Its options, `root` standing for the peer of a message, too.
        out: Where its result would go.

    Raises:
        UsageError: An argument is wrong, as for the call itself.
    """
    name = context.collective
    if name not in (*_KNOWN, "barrier", "send", "recv"):
        raise unknown_name("collective", name, (*_KNOWN, "barrier", "send", "recv"))
    if options.op is not None and name not in _REDUCING:
        raise UsageError(f"{context.where} takes no operator, but got op={options.op!r}")
    if name == "barrier":
        return transport.plan(Call("barrier", None, "none", 0, None, context.group), None, None)
    if name == "send":
        return _plan(transport, messages.prepare_send(context, x, options.root, 0))
    if name == "recv":
        return _plan(transport, messages.prepare_recv(context, x, options.root, 0))
    if name in _REDUCING and options.op is None:
        options = replace(options, op="sum")
    if name in ROOTED and options.root is None:
        options = replace(options, root=0)
    if name == "all_to_all" and options.counts is not None and options.receives is None:
        raise UsageError(
            f"{context.where} with counts takes receives, too, to be planned: the rows that this "
            "rank gets from each"
        )
    whole = None
    if name == "scatter" and context.rank != options.root:
        array = borrow(context.where, x).array
        x, whole = None, (array.dtype, array.shape)
    return _plan(transport, prepare(context, x, options, out, whole))


def _plan(transport: Transport, ready: Prepared) -> Plan:
    return transport.plan(ready.call, ready.x, ready.out)
