"""The arenas of a program's optimizers: laid out at the first trace, one per replica, then kept."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.graph.trace.trace import check_outside
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.arena_plan import UPDATES, ArenaPlan
from allreduce.graph.update.update import LocalReplicas, UpdateRule

_rules: weakref.WeakSet[UpdateRule] = weakref.WeakSet()  # arenas that have plans
_waiting: weakref.WeakKeyDictionary[UpdateRule, dict[str, np.ndarray]]
_waiting = weakref.WeakKeyDictionary()

_ATTRIBUTE = "_arena_plans"


class _Plans:
    """An optimizer's plans, which are an attribute of it; its copies begin without any.

    A weak dictionary by optimizer would never free a plan: that refers to its variables, they to
    their strategy, and the strategy's programs to the optimizer. The collector finds this cycle
    only if no dictionary of the module's holds the plan.
    """

    def __init__(self, rule: UpdateRule | None = None) -> None:
        self.all: list[ArenaPlan] = []
        self._owner = None if rule is None else weakref.ref(rule)

    def belong_to(self, rule: UpdateRule) -> bool:
        """Return whether they are this optimizer's, and not those of the one it was copied from."""
        return self._owner is not None and self._owner() is rule

    def __reduce__(self) -> tuple[type[_Plans], tuple[()]]:
        return _Plans, ()


def _plans_of(rule: UpdateRule) -> list[ArenaPlan]:
    found = vars(rule).get(_ATTRIBUTE)
    if found is None or not found.belong_to(rule):
        found = vars(rule)[_ATTRIBUTE] = _Plans(rule)
    plans: list[ArenaPlan] = found.all
    return plans


def plan_for(
    host: LocalReplicas, rule: UpdateRule, variables: Sequence[Variable], device: DeviceName
) -> ArenaPlan:
    """Return the rule's arena for these variables; a new one is laid out in the given order.

    Args:
        host: Whose replicas have it.
        rule: The optimizer.
        variables: All on one device, and of one dtype.
        device: As the replicas' program calls it.

    Raises:
        UsageError: The rule already updates some of them together with others, or two variables
            have one name.
    """
    wanted = set(variables)
    plans = _plans_of(rule)
    for plan in plans:
        if wanted.intersection(plan.variables):
            if wanted != set(plan.variables):
                _refuse(plan, wanted)
            return plan
    names = [variable.name for plan in plans for variable in plan.variables]
    names += [variable.name for variable in variables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"an optimizer's variables need different names, as its state is kept by them; {twice} "
            "are used twice"
        )
    plan = ArenaPlan(rule, variables, host, device)
    waiting = _waiting.get(rule)
    if waiting is not None:
        plan.load(waiting, rule.iterations)
    plans.append(plan)
    _rules.add(rule)
    if waiting is not None:
        for key in [f"{v.name}/{slot}" for v in variables for slot in (UPDATES, *rule.all_slots)]:
            waiting.pop(key, None)
    return plan


def _refuse(plan: ArenaPlan, wanted: set[Variable]) -> None:
    differing = sorted(v.name for v in wanted.symmetric_difference(plan.variables))
    raise UsageError(
        f"an optimizer updates the variables it was first used with, always together; {differing} "
        "would now be added or left out. Use another optimizer for another set of variables"
    )


def publish_iterations(rule: UpdateRule) -> None:
    """Let an optimizer know how many steps it has done."""
    done = [plan.arenas[0].iterations for plan in _plans_of(rule)]
    rule.iterations = max(rule.iterations, *done)


def optimizer_state(rule: UpdateRule) -> dict[str, np.ndarray]:
    """Copy an optimizer's state: "iterations", and for each variable "<variable>/<slot>"."""
    state: dict[str, np.ndarray] = dict(_waiting.get(rule, {}))
    for plan in _plans_of(rule):
        state.update(plan.state(rule.iterations))
    state["iterations"] = np.asarray(rule.iterations, np.int64)
    return state


def load_optimizer_state(rule: UpdateRule, state: Mapping[str, np.ndarray]) -> None:
    """Set an optimizer's state; parts without an arena wait for the first trace.

    Raises:
        UsageError: The state lacks "iterations", or has an unknown slot.
        ShapeError: A value's shape is not its variable's.
    """
    if "iterations" not in state:
        raise UsageError("an optimizer's state needs 'iterations', the number of steps done")
    slots = {key: np.asarray(value) for key, value in state.items() if key != "iterations"}
    known = (UPDATES, *rule.all_slots)
    strange = sorted(key for key in slots if key.rpartition("/")[2] not in known)
    if strange:
        raise UsageError(
            f"{type(rule).__name__} has the slots {rule.all_slots}; found {strange[:5]}"
        )
    for plan in _plans_of(rule):
        plan.load(slots, int(state["iterations"]))
        for variable in plan.variables:
            for name in known:
                slots.pop(f"{variable.name}/{name}", None)
    rule.iterations = int(state["iterations"])
    _waiting[rule] = slots


def consolidate(rule: UpdateRule) -> None:
    """Bring an optimizer's slots together on every rank, which all call.

    Raises:
        ClosedError: The variables' strategy is closed, or an error has ended it.
    """
    check_outside("consolidate", "call it between two steps")
    for plan in _plans_of(rule):
        host: Any = plan.variables[0].replicator
        host.between_steps(partial(plan.consolidate, host))


def finish_update(rule: UpdateRule) -> None:
    """Update with the gradients of the micro-batches since the latest update; all ranks call it.

    Raises:
        ClosedError: The variables' strategy is closed, or an error has ended it.
    """
    check_outside("finish_update", "call it between two steps")
    for plan in _plans_of(rule):
        host: Any = plan.variables[0].replicator
        if plan.accumulation.waiting:
            host.run(plan.accumulation.finish)


def renew(host: LocalReplicas) -> None:
    """Give a host's gradients new memory, after the communicator that had the old one has died."""
    for rule in list(_rules):
        for plan in _plans_of(rule):
            owner: object = plan.variables[0].replicator
            if owner is host:
                plan.renew(host)
