"""A program bound to memory: a Python function per instruction, for one batch size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce.comm import Work
from allreduce.devices import lookup as lookup_device
from allreduce.errors import NumericsError
from allreduce.graph.node import Node
from allreduce.graph.ops.base import lookup
from allreduce.graph.ops.collective import contribution_of_none
from allreduce.graph.outline import Outline
from allreduce.graph.printing import say
from allreduce.graph.program import Instruction, Program
from allreduce.graph.rendezvous import Key, Rendezvous
from allreduce.graph.replica import Moment, Replica
from allreduce.graph.spec import concrete
from allreduce.graph.stamp import Stamp
from allreduce.reduction import Arena

Step = Callable[[], None]


class Frame:
    """A program bound to buffers of one batch size.

    Args:
        program: What to run.
        replica: Who runs it.
        arenas: The replica's arenas, by id of their plan.
        rendezvous: Where transfers between the replica's devices meet.
        moment: The first step that it is for; others have the same rows.
        outline: What all ranks have to run alike; None where there is one rank.
    """

    def __init__(
        self,
        program: Program,
        replica: Replica,
        arenas: Mapping[int, Arena],
        rendezvous: Rendezvous,
        moment: Moment,
        outline: Outline | None,
    ) -> None:
        self.program = program
        self.replica = replica
        self.arenas = arenas
        self.rendezvous = rendezvous
        self.outline = outline
        self.stamps: dict[int, Stamp] = {}  # by id of the plan
        self.values: dict[int, np.ndarray] = {}
        self.works: dict[int, Work] = {}  # started and not awaited, by instruction
        self.moment = moment
        self.runtime: dict[str, np.ndarray] = {}
        self._give()
        self._in_place = self._find_in_place()
        self.steps = [
            self._after(instruction, self._build(index, instruction.node))
            for index, instruction in enumerate(program.instructions)
            if not (instruction.node.op == "store_gradient" and self._is_in_place(instruction.node))
        ]

    def _give(self) -> None:
        for node in self.program.given.values():
            if node.op == "constant":
                self.values[node.id] = node.attrs["value"]
            elif node.op == "runtime":
                value = self.runtime.setdefault(node.attrs["name"], np.zeros((), np.int64))
                self.values[node.id] = value

    def run(self, feeds: Sequence[np.ndarray], moment: Moment) -> list[np.ndarray]:
        """Run all instructions; returns copies of the outputs."""
        self.moment = moment
        for name, array in self.runtime.items():
            array[...] = self.replica.id if name == "replica" else getattr(moment, name)
        fed = dict(zip(self.program.inputs, feeds, strict=True))
        self.values.update(fed)
        with np.errstate(all="ignore"):  # infinities and NaN are results here, not warnings
            for step in self.steps:
                step()
        for index in list(self.works):  # what is fetched straight from a collective
            self.works.pop(index).wait()
        outputs = [self._output(node) for node in self.program.outputs]
        for i in fed:  # a batch may be large, and is the caller's
            del self.values[i]
        return outputs

    def _output(self, node: Node) -> np.ndarray:
        if node.id in self.values:
            return self.values[node.id].copy()
        # Left out of the null program: there are no rows of it.
        return np.zeros(self._shape(node), node.spec.dtype)

    def _find_in_place(self) -> dict[int, np.ndarray]:
        """Find the gradients that can be computed where they are reduced, and where that is."""
        uses = Counter(i for each in self.program.instructions for i in each.node.inputs)
        uses.update(node.id for node in self.program.outputs)
        made = {each.node.id: lookup(each.node.op) for each in self.program.instructions}
        places: dict[int, np.ndarray] = {}
        for instruction in self.program.instructions:
            node = instruction.node
            if node.op != "store_gradient" or uses[node.inputs[0]] > 1:
                continue
            op = made.get(node.inputs[0])
            if op is not None and op.kind == "compute" and not op.view:
                places[node.inputs[0]] = self._gradient(node)
        return places

    def _is_in_place(self, node: Node) -> bool:
        return node.inputs[0] in self._in_place

    def _arena(self, node: Node) -> Arena:
        return self.arenas[id(node.attrs["plan"])]

    def _gradient(self, node: Node) -> np.ndarray:
        arena = self._arena(node)
        return arena.view(arena.gradients, node.attrs["span"])

    def _after(self, instruction: Instruction, step: Step) -> Step:
        """Put the waits for collectives before a step; all else has ended when it was issued."""
        instructions = self.program.instructions
        waits = tuple(i for i in instruction.waits if instructions[i].stream == "collective")
        if not waits:
            return step

        def run() -> None:
            for i in waits:
                work = self.works.pop(i, None)
                if work is not None:  # another instruction may have waited for it
                    work.wait()
            step()

        return run

    def _build(self, index: int, node: Node) -> Step:
        if lookup(node.op).kind == "compute":
            return self._compute(node)
        if node.op == "all_reduce_bucket":
            return self._all_reduce(index, node)
        if lookup(node.op).kind == "collective":
            return self._collective(index, node)
        return _BUILDERS[node.op](self, node)

    def _buffer(self, node: Node) -> np.ndarray:
        return np.empty(self._shape(node), node.spec.dtype)

    def _shape(self, node: Node) -> tuple[int, ...]:
        return concrete(node.spec.shape, self.moment.rows, sum(self.moment.everyone or ()))

    def _compute(self, node: Node) -> Step:
        op, values, inputs, attrs = lookup(node.op), self.values, node.inputs, node.attrs
        view, kernel, target = op.view, op.cpu, node.id
        if view is not None:

            def look() -> None:
                values[target] = view(values[inputs[0]], attrs)

            return look
        assert kernel is not None, node
        out = self._in_place[target] if target in self._in_place else self._buffer(node)
        values[target] = out

        def run() -> None:
            kernel(out, [values[i] for i in inputs], attrs)

        return run

    def _read(self, node: Node) -> Step:
        variable, index = node.attrs["variable"], self.replica.index
        copy = node.attrs.get("copy", False)

        def run() -> None:
            value = variable.storage[index]
            self.values[node.id] = value.copy() if copy else value

        return run

    def _assign(self, node: Node) -> Step:
        variable, index, source = node.attrs["variable"], self.replica.index, node.inputs[0]

        def run() -> None:
            variable.storage[index][...] = self.values[source]

        return run

    def _print(self, node: Node) -> Step:
        who = f"replica {self.replica.id}: " if self.replica.communicator is not None else ""
        parts, sep = node.attrs["parts"], node.attrs["sep"]

        def run() -> None:
            say([self.values[i] for i in node.inputs], parts, sep, who)

        return run

    def _store_gradient(self, node: Node) -> Step:
        place, source = self._gradient(node), node.inputs[0]

        def run() -> None:
            place[...] = self.values[source]

        return run

    def _store_count(self, node: Node) -> Step:
        count, source = self._arena(node).count, node.inputs[0]

        def run() -> None:
            count[0] = self.values[source]

        return run

    def _clear_gradients(self, node: Node) -> Step:
        gradients = self._arena(node).gradients

        def run() -> None:
            gradients[...] = 0

        return run

    def _all_reduce(self, index: int, node: Node) -> Step:
        bucket, communicator = node.attrs["bucket"], self.replica.communicator
        assert communicator is not None, "a single replica has no collectives"
        arena, stamp = self._arena(node), self._stamp(node)
        part = arena.gradients[bucket.start : bucket.stop]
        start = communicator.all_reduce_init(part, op="sum", out=part)

        def run() -> None:
            if stamp is not None:
                stamp.put(arena.iterations)
            self.works[index] = start()

        return run

    def _collective(self, index: int, node: Node) -> Step:
        """Exchange values among the replicas in the middle of a step."""
        communicator, out = self.replica.communicator, self._buffer(node)
        assert communicator is not None, "a single replica has no collectives"
        self.values[node.id] = out
        call = getattr(communicator, node.op)
        named = self._named(node)
        absent = node.attrs.get("absent")
        nothing = contribution_of_none(node, out.shape) if absent else None

        def run() -> None:
            x = self.values[node.inputs[0]] if nothing is None else nothing
            self.works[index] = call(x, out=out, async_op=True, **named)

        return run

    def _named(self, node: Node) -> dict[str, Any]:
        """Return the keywords of a collective's call."""
        if node.op == "all_reduce":
            return {"op": node.attrs["op"]}
        factor = node.attrs["rows_per_sample"]
        if factor is None:
            return {}
        return {"counts": [factor * rows for rows in self.moment.everyone or ()]}

    def _stamp(self, node: Node) -> Stamp | None:
        """Return what makes sure, with an arena's first bucket, that ranks do alike."""
        communicator, arena = self.replica.communicator, self._arena(node)
        if self.outline is None or communicator is None or node.attrs["bucket"].index != 0:
            return None
        place = arena.gradients[1 : arena.layout.header]
        stamp = Stamp(self.outline, node.attrs["rule"], place, communicator)
        return self.stamps.setdefault(id(node.attrs["plan"]), stamp)

    def _update_bucket(self, node: Node) -> Step:
        arena, bucket, rule = self._arena(node), node.attrs["bucket"], node.attrs["rule"]
        part = slice(bucket.parameters_start, bucket.stop)
        parameters, gradients = arena.parameters[part], arena.gradients[part]
        slots = {name: array[part] for name, array in arena.slots.items()}
        is_first, stamp = bucket.index == 0, self._stamp(node)

        def run() -> None:
            if stamp is not None:
                stamp.check()
            if is_first:
                _check_count(float(arena.count[0]))
                arena.iterations += 1
            rule.update(parameters, gradients, slots, arena.count, arena.iterations)

        return run

    def _send(self, node: Node) -> Step:
        source = node.inputs[0]

        def run() -> None:
            self.rendezvous.send(self._key(node), self.values[source])

        return run

    def _receive(self, node: Node) -> Step:
        assert node.device is not None, node
        out, device = self._buffer(node), lookup_device(node.device)
        stream = device.stream("transfer")

        def run() -> None:
            # Sends come first in issue order, so the value is there.
            device.copy(out, self.rendezvous.receive(self._key(node), timeout=1.0), stream)
            self.values[node.id] = out

        return run

    def _key(self, node: Node) -> Key:
        generation, step = self.replica.generation, self.moment.step
        edge, source = node.attrs["edge"], node.attrs["source"]
        return Key(generation, step, edge, source, node.attrs["destination"])


def _check_count(count: float) -> None:
    """Refuse to divide by a number of samples that is none; all replicas have the same sum."""
    if not 0 <= count < math.inf:
        raise NumericsError(
            f"the weights of all replicas add up to {count}; expected a finite number from 0 up: "
            "check the weight given to minimize or apply"
        )


_BUILDERS: dict[str, Callable[[Frame, Node], Step]] = {
    "read": Frame._read,
    "assign": Frame._assign,
    "print": Frame._print,
    "store_gradient": Frame._store_gradient,
    "store_count": Frame._store_count,
    "clear_gradients": Frame._clear_gradients,
    "update_bucket": Frame._update_bucket,
    "send": Frame._send,
    "receive": Frame._receive,
}
