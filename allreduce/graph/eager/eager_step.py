"""Run a function eagerly as one step on this process's replicas."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from allreduce.errors import MismatchError
from allreduce.graph.core import pytree
from allreduce.graph.eager.eager import EagerTrace
from allreduce.graph.eager.lockstep import Meet, Meeting, run_in_lockstep
from allreduce.graph.trace.output_structure import Returned, take_apart
from allreduce.graph.trace.replica import Replica, StepInfo
from allreduce.graph.trace.signature import Arguments
from allreduce.graph.trace.trace import recording
from allreduce.graph.update.changes import name_of, needs_all
from allreduce.graph.update.host import Host


def run_eagerly(
    host: Host,
    replicas: Sequence[Replica],
    fn: Callable[..., Any],
    arguments: Arguments,
    step_infos: Sequence[StepInfo],
) -> tuple[Returned, list[list[np.ndarray]]]:
    """Call `fn` for each replica with values; returns its result's structure and the values.

    Args:
        host: The replicas of this process.
        replicas: The replicas that run: all, or one without a communicator.
        fn: The step.
        arguments: Its arguments.
        step_infos: The step information of each local replica.

    Raises:
        MismatchError: Replicas took different branches.
        UsageError: A single one of several replicas would change variables or communicate.
    """

    def play(replica: Replica, meet: Meet) -> tuple[Returned, list[np.ndarray]]:
        index = replica.index
        absent = arguments.rows is not None and not step_infos[index].rows
        feeds = [values[index] for values in arguments.feeds]
        if replica.communicator is None and host.num_replicas_in_sync > 1:
            meet = _refuse(fn, host)
        trace = EagerTrace(host, replica, step_infos[index], feeds, absent, meet)
        try:
            with recording(trace):
                args, kwargs = arguments.placeholders(trace)
                returned, outputs = take_apart(fn(*args, **kwargs))
                return returned, [each.numpy() for each in outputs]
        finally:
            trace.close()

    results = run_in_lockstep([partial(play, each) for each in replicas])
    returned, values = zip(*results, strict=True)
    if any(_form(each) != _form(returned[0]) for each in returned):
        raise MismatchError(
            f"{name_of(fn)} returned {_shown(returned)} on the replicas of this process; return "
            "the same structure on all of them"
        )
    return returned[0], list(values)


def _form(returned: Returned) -> Hashable:
    """Return the results; values that are no tensors are taken from the first replica."""
    kinds = tuple(map(type, pytree.leaves(returned.structure)))
    return pytree.outline(returned.structure), kinds, returned.rows_per_sample


def _shown(returned: Sequence[Returned]) -> str:
    return ", ".join(f"{each.structure!r:.60}" for each in returned)


def _refuse(fn: Callable[..., Any], host: Host) -> Meet:
    def meet(meeting: Meeting) -> NoReturn:
        changes = meeting.what in ("assign", "apply_gradients")
        what = "changes variables" if changes else "has collectives"
        raise needs_all(fn, what, host.num_replicas_in_sync)

    return meet
