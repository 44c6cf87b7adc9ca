"""Turn the arguments of `Communicator.plan` into the transport's plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from allreduce.comm import lists
from allreduce.comm.arguments import call_text, messages, scaling
from allreduce.comm.arguments.arrays import borrow
from allreduce.comm.arguments.checks import UNSCALED, Context, Options
from allreduce.comm.arguments.prepare import Prepared, prepare
from allreduce.comm.calls.call import ANY, ROOTED, Call, without_digest
from allreduce.comm.calls.plan import Plan
from allreduce.comm.core.transport import Transport
from allreduce.errors import UsageError, unknown_name
from allreduce.events import counted

_FACTORS = ("prescale", "postscale")
_REDUCING = ("op", *_FACTORS, "out")
_TAKES: dict[str, tuple[str, ...]] = {  # besides the array
    "all_reduce": _REDUCING,
    "reduce": (*_REDUCING, "root"),
    "reduce_scatter": (*_REDUCING, "counts"),
    "all_gather": ("counts", "out"),
    "gather": ("root", "counts", "out"),
    "scatter": ("root", "counts", "out"),
    "broadcast": ("root", "out"),
    "all_to_all": ("counts", "receives", "out"),
    "barrier": (),
    "send": ("dest", "tag"),
    "recv": ("source", "tag"),
}


def describe(context: Context, transport: Transport, x: Any, given: Mapping[str, Any]) -> Plan:
    """Plan a call with the arguments that it would get.

    Args:
        x: The collective's input; for scatter the root's array, on all members; for recv its
            output.
        given: Its other arguments by name; None if omitted.

    Raises:
        UsageError: An argument is wrong, as for the call itself.
    """
    name = context.collective
    if name not in _TAKES:
        raise unknown_name("collective", name, _TAKES, f"{context.member}: plan")
    for key, value in given.items():
        if value is not None and key not in _TAKES[name]:
            raise UsageError(f"{context.where} takes no {key}, but got {key}={value!r}")
    if name == "barrier":
        return _plan_barrier(context, transport)
    if name in ("send", "recv"):
        return _plan(transport, _message(context, x, given), "")
    options = _options(context, given)
    if isinstance(x, list | tuple):
        return _describe_list(context, transport, x, options, given["out"])
    return _describe_array(context, transport, x, options, given["out"])


def _plan_barrier(context: Context, transport: Transport) -> Plan:
    return transport.plan(Call("barrier", None, "none", 0, None, context.group), None, None)


def _message(context: Context, x: Any, given: Mapping[str, Any]) -> Prepared:
    tag = given["tag"]
    if context.collective == "send":
        return messages.prepare_send(context, x, given["dest"], 0 if tag is None else tag)
    source = ANY if given["source"] is None else given["source"]
    return messages.prepare_recv(context, x, source, ANY if tag is None else tag)


def _options(context: Context, given: Mapping[str, Any]) -> Options:
    """Replace omitted arguments by their defaults."""
    name = context.collective
    if name == "all_to_all" and given["counts"] is not None and given["receives"] is None:
        raise UsageError(
            f"{context.where} with counts takes receives, too, to be planned: the rows that this "
            "rank gets from each"
        )
    op = given["op"] or ("sum" if "op" in _TAKES[name] else None)
    root = 0 if name in ROOTED and given["root"] is None else given["root"]
    scale = tuple(1.0 if given[key] is None else given[key] for key in _FACTORS)
    chosen = Options(op, root, given["counts"], given["receives"])
    return chosen if scale == UNSCALED else replace(chosen, scale=(scale[0], scale[1]))


def _describe_array(
    context: Context, transport: Transport, x: Any, options: Options, out: Any
) -> Plan:
    array = borrow(context.where, x).array
    whole = None
    if context.collective == "scatter" and context.rank != options.root:
        x, whole = None, (array.dtype, array.shape)
    if options.scale is not UNSCALED:
        scale = scaling.check_factors(context, options.scale, options.op, array.dtype)
        options = replace(options, scale=scale)
    ready = prepare(context, x, options, out, whole)
    said = call_text.of_array(context.collective, array.dtype, array.shape, options, always=True)
    plan = _plan(transport, ready, said)
    before, after = options.scale
    steps = plan.steps
    if before != 1 and ready.x is not None:
        steps = (f"multiply the input by {before!r}", *steps)
    if after != 1 and ready.out is not None:
        steps = (*steps, f"multiply the result by {after!r}")
    return replace(plan, steps=steps)


def _describe_list(
    context: Context, transport: Transport, x: Sequence[Any], options: Options, out: Any
) -> Plan:
    """Plan a list of arrays: a call for each dtype."""
    request = lists.read(context, x, options, out)
    arrays, parts = request.arrays, []
    for items in request.bundles:
        source = arrays[items[0]]
        into = request.targets[items[0]] if request.targets else None
        if len(items) > 1:  # its place in memory is that of no array, and it is never touched
            count = sum(arrays[item].size for item in items)
            source = into = np.empty(count, source.dtype)
        parts.append(_describe_array(context, transport, source, options, into))
    steps: tuple[str, ...] = (
        "pack the small arrays of each dtype into one",
        "make the calls",
        "unpack the results",
    )
    if not parts:
        parts, steps = [_plan_barrier(context, transport)], ("meet: there is nothing to carry",)
    elif len(parts) == len(arrays):
        steps = ("make a call of each array",)
    how = counted(len(parts), "call")
    said = request.options.call_text
    return Plan(without_digest(said), transport.name, how, steps, parts=tuple(parts))


def _plan(transport: Transport, ready: Prepared, said: str) -> Plan:
    made = transport.plan(ready.call, ready.x, ready.out)
    return replace(made, call=said) if said else made
