"""Eager steps: each operation is recorded as in a trace, and computed at once.

The recorded graph equals that of a traced step, so that gradients, random draws and means over
named batches are the same. It is dropped when the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from allreduce.devices import read, write
from allreduce.devices.budget import largest
from allreduce.errors import MismatchError, OutOfMemoryError
from allreduce.graph.consistency.rank_check import Facts
from allreduce.graph.core import pytree
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.core.numerics import run_now
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.spec import Spec, concrete
from allreduce.graph.core.tensor import EagerTensor, TracedTensor
from allreduce.graph.eager import eager_collectives
from allreduce.graph.eager.lockstep import Meet, Meeting, run_in_lockstep
from allreduce.graph.execute.memory import describe_value
from allreduce.graph.ops.collective import neutral_contribution
from allreduce.graph.placement.placement import PlacementRow, choose, put, report
from allreduce.graph.schedule.dependence import depends, of_replica, of_samples
from allreduce.graph.trace.output_structure import OutputStructure, take_apart
from allreduce.graph.trace.printing import say
from allreduce.graph.trace.replica import Replica, StepInfo
from allreduce.graph.trace.signature import Arguments
from allreduce.graph.trace.trace import Trace, recording
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.program_check import (
    call,
    check_equal,
    check_once,
    check_owner,
    compared_variables,
    name_of,
    needs_all,
    summary,
    synchronize,
)
from allreduce.graph.update.update import LocalReplicas

_NOTHING = np.zeros((), np.int64)  # the value of operations with only an effect


class EagerTrace(Trace):
    """One replica's step while it runs.

    A replica without samples computes with zeros where values depend on samples. Like the null
    program, it takes part in everything and has no weight.

    Args:
        feeds: The values of placeholders, in order.
        absent: Whether the replica has no samples.
        meet: Runs a function together with the other replicas.
    """

    has_values = True

    def __init__(
        self,
        host: LocalReplicas,
        replica: Replica,
        info: StepInfo,
        feeds: Iterable[np.ndarray],
        absent: bool,
        meet: Meet,
    ) -> None:
        super().__init__(host.num_replicas_in_sync)
        self._host = host
        self._replica = replica
        self._info = info
        self._feeds = iter(feeds)
        self._absent = absent
        self._meet = meet
        self._values: dict[int, np.ndarray] = {}
        self._of_samples: set[int] = set()
        self._of_replica: set[int] = set()
        self._updated: set[Variable] = set()

    def _record(self, node: Node) -> None:
        """Append a node and compute its value."""
        node = self._placed(node)
        super()._record(node)
        for found, root in ((self._of_samples, of_samples), (self._of_replica, of_replica)):
            if depends(node, found, root):
                found.add(node.id)
        try:
            self._values[node.id] = self._value(node)
        except OutOfMemoryError:
            raise
        except MemoryError as error:
            raise self._shortage(node, error) from error

    def _shortage(self, node: Node, error: MemoryError) -> OutOfMemoryError:
        """Build the error that names the operator and the largest values of the step."""
        whole = {id(_memory(value)): i for i, value in reversed(self._values.items())}
        contents = [
            (self._values[i].nbytes, describe_value(self.nodes[i], self._values[i].shape))
            for i in whole.values()
        ]
        return OutOfMemoryError(
            f"no memory for {node.op} at {node.source}: {error}; use a smaller model or batch, or "
            f"fewer replicas per host{largest(contents)}"
        )

    def tensor(self, id: int) -> TracedTensor:
        return EagerTensor(self, id, self.nodes[id].spec, self._values[id])

    def close(self) -> None:
        """Drop all values except those of tensors that are still referenced."""
        self.nodes.clear()
        for kept in (self._values, self._current, self._reads, self._runtime):
            kept.clear()  # of tensors that know this trace, they would wait for the collector

    def _placed(self, node: Node) -> Node:
        """Give a node a device; nothing moves between CPUs, but their variables lie there."""
        places = self._replica.places
        device, reason = choose(node, self.nodes.__getitem__, places.home, list(places.names))
        report([PlacementRow(node.op, device, reason, node.source)], places.names)
        return put(node, device)

    def _value(self, node: Node) -> np.ndarray:
        special = _SPECIAL.get(node.op)
        if special is not None:
            return special(self, node)
        if lookup(node.op).kind == "collective":
            return self._exchange(node)
        return self._compute(node)

    def _compute(self, node: Node) -> np.ndarray:
        op, inputs = lookup(node.op), [self._values[i] for i in node.inputs]
        if self._lacks(node.id):
            return self._zeros(node.spec)
        if op.view is not None:
            return op.view(inputs[0], node.attrs)
        when = f"replica {self._replica.id}, step {self._info.step}"
        output = self._shape(node.spec), node.spec.dtype
        return run_now(op, inputs, node.attrs, output, lambda: (node.source, node.part, when))

    def _lacks(self, id: int) -> bool:
        """Return whether a value is one of samples, of which there are none."""
        return self._absent and id in self._of_samples

    def _shape(self, spec: Spec) -> tuple[int, ...]:
        return concrete(spec.shape, self._info.rows, sum(self._info.rows_per_replica or ()))

    def _zeros(self, spec: Spec) -> np.ndarray:
        return np.zeros(self._shape(spec), spec.dtype)

    def _specs(self, node: Node) -> list[Spec]:
        return [self.nodes[i].spec for i in node.inputs]

    def _placeholder(self, _node: Node) -> np.ndarray:
        fed = next(self._feeds)
        return fed if type(fed) is np.ndarray else read(fed)  # a batch staged on a device

    def _constant(self, node: Node) -> np.ndarray:
        value: np.ndarray = node.attrs["value"]
        return value

    def _known_when_run(self, node: Node) -> np.ndarray:
        name = node.attrs["name"]
        value = self._replica.id if name == "replica" else getattr(self._info, name)
        return np.asarray(value, np.int64)

    def _read(self, node: Node) -> np.ndarray:
        variable = self._variable(node)
        # A copy, because the step may change the variable later.
        return read(variable.storage[self._replica.index])

    def _assign(self, node: Node) -> np.ndarray:
        if self.replicas > 1:
            check_equal(node, self._of_replica)
        variable = self._variable(node)

        def assign(brought: list[tuple[int, np.ndarray]]) -> list[np.ndarray]:
            for index, value in brought:
                write(variable.storage[index], value)
            return [_NOTHING] * len(brought)

        if self._lacks(node.inputs[0]):  # with one replica only
            return _NOTHING
        return self._together(node, (self._replica.index, self._values[node.inputs[0]]), assign)

    def _print(self, node: Node) -> np.ndarray:
        if not any(self._lacks(i) for i in node.inputs):
            who = "" if self._replica.communicator is None else f"replica {self._replica.id}: "
            values = [self._values[i] for i in node.inputs]
            say(values, node.attrs["parts"], node.attrs["sep"], who)
        return _NOTHING

    def _apply_gradients(self, node: Node) -> np.ndarray:
        self._take_in(node.attrs["variables"])
        check_once(node, self._updated)
        feeds = [self._values[i] for i in node.inputs]
        if self._absent:
            feeds = [np.zeros_like(each) for each in feeds]
        work = partial(eager_collectives.update, self._host, node, self._specs(node), self._facts())

        def update(brought: list[Any]) -> list[np.ndarray]:
            work(brought)
            return [_NOTHING] * len(brought)

        return self._together(node, (feeds, self._info), update)

    def _exchange(self, node: Node) -> np.ndarray:
        (source,) = node.inputs
        value = self._values[source]
        if self._lacks(source) or (self._absent and node.op == "all_reduce"):
            value = neutral_contribution(node, self._shape(node.spec))
        work = partial(
            eager_collectives.exchange, self._host, node, self._specs(node), self._facts()
        )
        return self._together(node, ([value], self._info), work)

    def _facts(self) -> Facts | None:
        """Summarise what must be equal on all ranks so far; None with one rank."""
        if len(self._host.devices) == self.replicas:
            return None
        done = Graph(tuple(self.nodes))
        self._host.rank_digest.involve(compared_variables(done))
        return summary(done)

    def _take_in(self, variables: Sequence[Variable]) -> None:
        """Let all replicas have the values of the first one before a variable's first step."""
        check_owner(self._host, variables)
        fresh = [each for each in variables if each not in self._host.shared]
        if not fresh or self._replica.communicator is None:
            return

        def share(brought: list[None]) -> list[None]:
            synchronize(self._host, fresh)
            return brought

        names = ", ".join(repr(variable.name) for variable in fresh)
        source = self.nodes[-1].source
        self._meet(Meeting(f"the first use of {names}", source, ("use", fresh), None, share))

    def _variable(self, node: Node) -> Variable:
        """Return the variable that a node reads or changes, on its device."""
        variable: Variable = node.attrs["variable"]
        self._take_in([variable])
        assert node.device is not None, node
        variable.settle(node.device)
        return variable

    def _together(self, node: Node, brought: Any, work: Callable[[Any], Any]) -> np.ndarray:
        key = (node.op, dict(node.attrs), node.spec)
        value: np.ndarray = self._meet(Meeting(node.op, node.source, key, brought, work))
        return value


def _memory(value: np.ndarray) -> np.ndarray:
    """Return the array that a view was made of: of views it is one of several values."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value


_SPECIAL: dict[str, Callable[[EagerTrace, Node], np.ndarray]] = {
    "placeholder": EagerTrace._placeholder,
    "constant": EagerTrace._constant,
    "runtime": EagerTrace._known_when_run,
    "read": EagerTrace._read,
    "assign": EagerTrace._assign,
    "print": EagerTrace._print,
    "apply_gradients": EagerTrace._apply_gradients,
}


def run_eagerly(
    host: LocalReplicas,
    replicas: Sequence[Replica],
    fn: Callable[..., Any],
    arguments: Arguments,
    step_infos: Sequence[StepInfo],
) -> tuple[OutputStructure, list[list[np.ndarray]]]:
    """Call `fn` for each replica with values; returns its result's structure and the values.

    Args:
        replicas: The replicas that run: all, or one without a communicator.

    Raises:
        MismatchError: Replicas took different branches.
        UsageError: A single one of several replicas would change variables or communicate.
    """

    def play(replica: Replica, meet: Meet) -> tuple[OutputStructure, list[np.ndarray]]:
        index = replica.index
        absent = arguments.rows is not None and not step_infos[index].rows
        feeds = [values[index] for values in arguments.feeds]
        if replica.communicator is None and host.num_replicas_in_sync > 1:
            meet = _refuse(fn, host)
        trace = EagerTrace(host, replica, step_infos[index], feeds, absent, meet)
        try:
            with recording(trace):
                args, kwargs = arguments.placeholders(trace)
                returned, outputs = take_apart(call(fn, args, kwargs))
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


def _form(returned: OutputStructure) -> Hashable:
    """Return what must be equal on replicas; other values are taken from the first one."""
    kinds = tuple(map(type, pytree.leaves(returned.structure)))
    return pytree.treedef(returned.structure), kinds, returned.rows_per_sample


def _shown(returned: Sequence[OutputStructure]) -> str:
    return ", ".join(f"{each.structure!r:.60}" for each in returned)


def _refuse(fn: Callable[..., Any], host: LocalReplicas) -> Meet:
    def meet(meeting: Meeting) -> NoReturn:
        changes = meeting.what in ("assign", "apply_gradients")
        what = "changes variables" if changes else "has collectives"
        raise needs_all(fn, what, host.num_replicas_in_sync)

    return meet
