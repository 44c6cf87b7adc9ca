"""Plan a call: make it with a dispatcher that asks the transport for its plan instead."""

from __future__ import annotations

import copy
import inspect
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from allreduce.comm.arguments.arrays import borrow
from allreduce.comm.arguments.checks import Context, Options
from allreduce.comm.arguments.prepare import Prepared
from allreduce.comm.calls.call import COLLECTIVES, Array, Call, shaped
from allreduce.comm.calls.plan import Plan
from allreduce.comm.dispatch import Dispatcher
from allreduce.errors import UnsupportedError, UsageError, unknown_name
from allreduce.events import counted

_PLANNED = tuple(name for name in COLLECTIVES if name != "empty")


class _Communicator(Protocol):
    _dispatch: Dispatcher


class _Planner(Dispatcher):
    """Plans the calls that it would start.

    Attributes:
        plans: One for each call.
        text: The last call, as its caller writes it.
    """

    def __init__(self, dispatch: Dispatcher, given: Mapping[str, Any]) -> None:
        vars(self).update(vars(dispatch), fast_path=None, lock=threading.RLock())
        self.plans: list[Plan] = []
        self.text = ""
        self.whole: tuple[int, ...] | None = None  # the shape of a scatter's array
        self._factors = given.get("prescale", 1), given.get("postscale", 1)

    def call(self, begin: Callable[[], Any], async_op: bool) -> Any:  # noqa: ARG002
        return begin()  # an interrupt has nothing to abort

    def in_order(self, context: Context, start: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ARG002
        if not arguments:
            raise UnsupportedError(
                f"{context.where} is planned for arrays in the host's memory; pass plan() a NumPy "
                "array of the same shape and dtype"
            )
        return self._plan(*arguments[:3])

    def _begin(self, context: Context, ready: Prepared) -> Any:  # noqa: ARG002
        return self._plan(ready.call, ready.x, ready.out)

    def _plan(self, call: Call, x: Array | None, out: Array | None) -> Any:
        shape = self.whole or ((call.count,) if x is None else x.shape)
        plain = shaped(replace(call, call_text=""), ", ".join(map(str, shape)))
        self.text = str(call) if call.call_text else plain
        plan = self.transport.plan(call, x, out)
        steps, (before, after) = plan.steps, self._factors
        if before != 1 and x is not None:
            steps = (f"multiply the input by {before!r}", *steps)
        if after != 1 and out is not None:
            steps = (*steps, f"multiply the result by {after!r}")
        self.plans.append(replace(plan, call=plain, steps=steps))
        return types.SimpleNamespace(where="")  # a work that nobody waits for


def describe(comm: _Communicator, collective: str, x: Any, given: Mapping[str, Any]) -> Plan:
    """Plan a call with the arguments that it would get.

    Args:
        x: The collective's input; for scatter the root's array, on all members; for recv its
            output.
        given: Its other arguments by name; None if the caller gives none.

    Raises:
        UsageError: An argument is wrong, as for the call itself.
    """
    given = {name: value for name, value in given.items() if value is not None}
    planner = _Planner(comm._dispatch, given)
    context = planner.context(collective)
    if collective not in _PLANNED:
        raise unknown_name("collective", collective, _PLANNED, f"{context.member}: plan")
    parameters = [*inspect.signature(getattr(type(comm), collective)).parameters][2:]
    takes = [*parameters, "receives"] if collective == "all_to_all" else parameters
    for key, value in given.items():
        if key not in takes:
            raise UsageError(f"{context.where} takes no {key}, but got {key}={value!r}")
    out = given.get("out")
    if collective == "scatter":  # of whose array the other members know dtype and shape
        array = borrow(context.where, x).array
        planner.whole = array.shape
        options = Options(root=given.get("root", 0), counts=given.get("counts"))
        mine = x if context.rank == options.root else None
        planner.start("scatter", mine, options, out, (array.dtype, array.shape))
    elif collective == "all_to_all" and not given.keys().isdisjoint(("counts", "receives")):
        if not {"counts", "receives"} <= given.keys():
            raise UsageError(
                f"{context.where} with counts takes receives, too, to be planned: the rows that "
                "this rank gets from each"
            )
        options = Options(counts=given["counts"], receives=given["receives"])
        planner.start("all_to_all", x, options, out)
    else:
        shadow = copy.copy(comm)
        shadow._dispatch = planner
        arguments = () if collective == "barrier" else (x,)
        if collective == "send":
            given = {"dest": None, **given}
        getattr(shadow, collective)(*arguments, **given)
    plans = tuple(planner.plans)
    if not isinstance(x, list | tuple):
        return replace(plans[0], call=planner.text)
    how = counted(len(plans), "call")
    steps = "make a call of each array"
    if len(plans) < len(x):
        steps = "pack small arrays by dtype, make the calls, and unpack the results"
    return Plan(planner.text, planner.transport.name, how, (steps,), parts=plans)
