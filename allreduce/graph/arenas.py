"""The arenas of a program's optimizers: laid out at the first trace, one per replica, then kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from allreduce.comm import Communicator
from allreduce.devices import lookup
from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.graph.executor import Replica
from allreduce.graph.update import UpdateRule
from allreduce.graph.variable import Variable
from allreduce.reduction import Arena, Bucket, Layout, lay_out, plan_buckets


class Host(Protocol):
    """The replicas of this process, as compiling a step needs them."""

    @property
    def devices(self) -> Sequence[DeviceName]: ...
    @property
    def replicas(self) -> Sequence[Replica]: ...
    @property
    def num_replicas_in_sync(self) -> int: ...

    def on_replicas(self, work: Callable[[int], Any]) -> list[Any]: ...


class ArenaPlan:
    """How an optimizer's variables of one dtype lie in memory, and that memory per replica."""

    def __init__(self, rule: UpdateRule, variables: Sequence[Variable], host: Host) -> None:
        self.rule = rule
        self.variables = tuple(variables)
        named = [(variable.name, variable.shape) for variable in variables]
        self.layout: Layout = lay_out(named, variables[0].dtype)
        self.buckets: tuple[Bucket, ...] = plan_buckets(self.layout)
        self.arenas: list[Arena] = host.on_replicas(lambda index: self._build(host, index))
        for index, arena in enumerate(self.arenas):
            for place, variable in enumerate(self.variables):
                view = arena.view(arena.parameters, place)
                view[...] = variable.storage[index]
                variable.storage[index] = view

    def _build(self, host: Host, index: int) -> Arena:
        device = lookup(host.devices[index])
        communicator: Communicator | None = host.replicas[index].communicator

        def private(size: int, dtype: np.dtype[Any]) -> np.ndarray:
            array: np.ndarray = device.allocate(size * dtype.itemsize).array(dtype, (size,))
            return array

        def symmetric(size: int, dtype: np.dtype[Any]) -> np.ndarray:
            return communicator.empty((size,), dtype) if communicator else private(size, dtype)

        arena = Arena(self.layout, self.rule.slots, private, symmetric)
        arena.gradients[...] = 0
        return arena

    def state(self) -> dict[str, np.ndarray]:
        """Copy the optimizer's slots, keyed "<variable>/<slot>"."""
        arena = self.arenas[0]
        return {
            f"{variable.name}/{slot}": arena.view(array, place).copy()
            for place, variable in enumerate(self.variables)
            for slot, array in arena.slots.items()
        }

    def load(self, state: Mapping[str, np.ndarray], iterations: int) -> None:
        """Set the slots that `state` has."""
        for arena in self.arenas:
            arena.iterations = iterations
            for place, variable in enumerate(self.variables):
                for slot, array in arena.slots.items():
                    value = state.get(f"{variable.name}/{slot}")
                    if value is not None:
                        arena.view(array, place)[...] = value


_plans: weakref.WeakKeyDictionary[Any, list[ArenaPlan]] = weakref.WeakKeyDictionary()
_waiting: weakref.WeakKeyDictionary[Any, dict[str, np.ndarray]] = weakref.WeakKeyDictionary()


class Arenas:
    """The arenas of one set of replicas."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._plans: list[ArenaPlan] = []

    def plan(self, rule: UpdateRule, variables: Sequence[Variable]) -> ArenaPlan:
        """Return the rule's arena for these variables; new ones are laid out in the given order.

        Raises:
            UsageError: The rule already updates some of them together with others.
        """
        wanted = set(variables)
        for plan in self._plans:
            if plan.rule is rule and wanted.intersection(plan.variables):
                if wanted != set(plan.variables):
                    _refuse(plan, wanted)
                return plan
        plan = ArenaPlan(rule, variables, self._host)
        self._plans.append(plan)
        _plans.setdefault(rule, []).append(plan)
        if rule in _waiting:
            plan.load(_waiting[rule], rule.iterations)
        return plan

    def publish_iterations(self) -> None:
        """Let each optimizer know how many steps it has done."""
        for plan in self._plans:
            plan.rule.iterations = plan.arenas[0].iterations


def _refuse(plan: ArenaPlan, wanted: set[Variable]) -> None:
    differing = sorted(v.name for v in wanted.symmetric_difference(plan.variables))
    raise UsageError(
        f"an optimizer updates the variables it was first used with, always together; {differing} "
        "would now be added or left out. Use another optimizer for another set of variables"
    )


def optimizer_state(rule: UpdateRule) -> dict[str, np.ndarray]:
    """Copy an optimizer's state: "<variable>/<slot>" for each slot, and "iterations"."""
    state: dict[str, np.ndarray] = dict(_waiting.get(rule, {}))
    for plan in _plans.get(rule, ()):
        state.update(plan.state())
    state["iterations"] = np.asarray(rule.iterations, np.int64)
    return state


def load_optimizer_state(rule: UpdateRule, state: Mapping[str, np.ndarray]) -> None:
    """Set an optimizer's state; what has no arena yet waits for the first trace."""
    rule.iterations = int(state["iterations"])
    _waiting[rule] = {key: value for key, value in state.items() if key != "iterations"}
    for plan in _plans.get(rule, ()):
        plan.load(state, rule.iterations)


def synchronize(host: Host, variables: Sequence[Variable]) -> None:
    """Give every replica the values that replica 0 has, once per variable."""
    fresh = [variable for variable in variables if not variable.in_step]
    if host.num_replicas_in_sync > 1 and fresh:

        def receive(index: int) -> None:
            communicator = host.replicas[index].communicator
            assert communicator is not None
            for variable in fresh:
                value = variable.storage[index]
                communicator.broadcast(value, root=0, out=value)

        host.on_replicas(receive)
    for variable in fresh:
        variable.in_step = True
