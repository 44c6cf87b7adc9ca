"""From a Python function to executors: trace, passes, placement, partition, schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from allreduce import events
from allreduce.devices import logical_devices
from allreduce.errors import UsageError
from allreduce.graph import nest, passes
from allreduce.graph.arenas import ArenaPlan, Arenas, Host, synchronize
from allreduce.graph.executor import Executor, Replica
from allreduce.graph.node import Graph
from allreduce.graph.partition import partition
from allreduce.graph.placement import place
from allreduce.graph.schedule import schedule
from allreduce.graph.signature import Arguments
from allreduce.graph.tensor import TracedTensor
from allreduce.graph.trace import Trace, as_tensor, recording
from allreduce.graph.variable import Variable


@dataclass(slots=True)
class Compiled:
    """A traced function, ready to run.

    Attributes:
        graph: One replica's program before placement.
        executors: One per local replica.
        result: What the function returned, with True in place of each tensor.
    """

    graph: Graph
    executors: list[Executor]
    result: Any

    def rebuild(self, values: Iterator[Any]) -> Any:
        """Put fetched values where the function returned tensors."""
        return nest.map_leaves(lambda fetched: next(values) if fetched else None, self.result)


class ProgramCache:
    """Compiled steps by function and signature; they live as long as the function does."""

    def __init__(self) -> None:
        self._by_owner: dict[int, dict[Hashable, Compiled]] = {}

    def get(self, fn: Callable[..., Any], key: Hashable, make: Callable[[], Compiled]) -> Compiled:
        """Return the step of this function and signature; `make` compiles a new one."""
        # A bound method is made anew at each access: its instance is what lives on.
        owner = getattr(fn, "__self__", fn)
        programs = self._by_owner.get(id(owner))
        if programs is None:
            # By id, as an instance need not be hashable; forgotten before its id can return.
            programs = self._by_owner[id(owner)] = {}
            weakref.finalize(owner, self._by_owner.pop, id(owner), None).atexit = False
        whole = (getattr(fn, "__func__", None), key)
        if whole not in programs:
            programs[whole] = make()
        return programs[whole]


def compile_step(
    host: Host, arenas: Arenas, fn: Callable[..., Any], arguments: Arguments
) -> Compiled:
    """Trace `fn` and prepare it for every local replica; all ranks do so together.

    Raises:
        UsageError: The function uses a variable of other replicas than `host`'s.
    """
    with events.span("compile", function=_name(fn)):
        graph, result = _trace(host, fn, arguments)
        synchronize(host, _variables(graph))
        plans = _plans(arenas, graph)
        graph = passes.bucket(graph, plans, host.num_replicas_in_sync)
        executors = [_prepare(host, replica, graph, plans) for replica in host.replicas]
        return Compiled(graph, executors, result)


def compile_alone(
    host: Host, fn: Callable[..., Any], arguments: Arguments, replica: Replica
) -> Compiled:
    """Trace `fn` and prepare it for one of several replicas, without the others taking part.

    Raises:
        UsageError: The function changes variables, which all replicas have to do together.
    """
    with events.span("compile", function=_name(fn)):
        graph, result = _trace(host, fn, arguments)
        if graph.effects:
            raise UsageError(
                f"{_name(fn)} changes variables of {host.num_replicas_in_sync} replicas; call it "
                "through strategy.run(...), so that all of them take part"
            )
        return Compiled(graph, [_prepare(host, replica, graph, [])], result)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _trace(host: Host, fn: Callable[..., Any], arguments: Arguments) -> tuple[Graph, Any]:
    trace = Trace()
    outputs: list[TracedTensor] = []

    def fetch(leaf: Any) -> bool:
        if leaf is None:
            return False
        tensor = as_tensor(leaf)
        assert isinstance(tensor, TracedTensor)
        outputs.append(tensor)
        return True

    with recording(trace):
        args, kwargs = arguments.placeholders(trace)
        result = nest.map_leaves(fetch, fn(*args, **kwargs))
    graph = passes.order_reads(passes.prune(trace.finish(outputs)))
    _check_owner(host, graph)
    return graph, result


def _variables(graph: Graph) -> list[Variable]:
    """List the variables that a graph reads or changes, in the order in which it meets them."""
    found: dict[Variable, None] = {}
    for node in graph.nodes:
        read = node.attrs.get("variable")
        found.update(dict.fromkeys(() if read is None else (read,)))
        found.update(dict.fromkeys(node.attrs.get("changes", ())))
    return list(found)


def _check_owner(host: Host, graph: Graph) -> None:
    for variable in _variables(graph):
        owner: object = variable.replicator
        if owner is not host:
            raise UsageError(
                f"variable {variable.name!r} was made for {owner!r}, but the step "
                f"runs on {host!r}; make the model and the optimizer inside `with "
                "strategy.scope():` and run its steps with the same strategy"
            )


def _plans(arenas: Arenas, graph: Graph) -> list[ArenaPlan]:
    """Return each `apply_gradients` node's arena, laid out in the order gradients become ready."""
    plans = []
    for node in graph.nodes:
        if node.op == "apply_gradients":
            pairs = zip(node.inputs[1:], node.attrs["variables"], strict=True)
            ready = [variable for _, variable in sorted(pairs, key=lambda pair: pair[0])]
            plans.append(arenas.plan(node.attrs["rule"], ready))
    return plans


def _prepare(host: Host, replica: Replica, graph: Graph, plans: list[ArenaPlan]) -> Executor:
    available = [device.name for device in logical_devices()]
    placed, _ = place(graph, host.devices[replica.index], available)
    program = schedule(partition(placed))
    events.logger.debug("replica %d runs\n%s", replica.id, program)
    arenas = {id(plan): plan.arenas[replica.index] for plan in plans}
    return Executor(program, replica, arenas)
