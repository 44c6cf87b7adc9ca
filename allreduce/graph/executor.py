"""The CPU executor: replays a program on one replica."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.errors import InternalError
from allreduce.graph.node import Node
from allreduce.graph.ops.base import lookup
from allreduce.graph.program import Instruction, Program
from allreduce.graph.rendezvous import Key, LocalRendezvous, Rendezvous
from allreduce.graph.spec import concrete
from allreduce.reduction import Arena

# Buffers are kept for this many batch sizes: the usual one and the last, smaller one, for two
# datasets.
KEPT_FRAMES = 4


@dataclass(frozen=True, slots=True)
class Replica:
    """Who runs: `index` among this process's replicas, `id` among all."""

    index: int
    id: int
    communicator: Communicator | None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """What a step is told: its samples, where they lie in the global batch, and its number."""

    rows: int
    row_offset: int
    step: int


class Executor:
    """Runs one program on one replica, one batch at a time.

    CPU streams run an instruction before the next is issued, so only collectives are ever pending.
    """

    def __init__(self, program: Program, replica: Replica, arenas: Mapping[int, Arena]) -> None:
        self.program = program
        self.replica = replica
        self.arenas = arenas  # by id of the plan
        self.rendezvous: Rendezvous = LocalRendezvous()
        self._frames: OrderedDict[int, Frame] = OrderedDict()

    def run(self, feeds: Sequence[np.ndarray], moment: Moment, batch: bool) -> list[np.ndarray]:
        """Run one step.

        Args:
            feeds: The program's inputs; read until the call returns.
            moment: This step's place in the run.
            batch: Whether some input is a share of a batch; without rows the null program runs
            then.

        Returns:
            The fetched values, in new arrays.
        """
        frame = self._frames.get(moment.rows)
        if frame is None:
            program = self.program.null() if batch and not moment.rows else self.program
            frame = self._frames[moment.rows] = Frame(program, self, moment.rows)
            if len(self._frames) > KEPT_FRAMES:
                self._frames.popitem(last=False)
        self._frames.move_to_end(moment.rows)
        return frame.run(feeds, moment)


Step = Callable[[], None]


class Frame:
    """A program bound to buffers of one batch size."""

    def __init__(self, program: Program, executor: Executor, rows: int) -> None:
        self.program = program
        self.replica = executor.replica
        self.arenas = executor.arenas
        self.rendezvous = executor.rendezvous
        self.rows = rows
        self.values: dict[int, np.ndarray] = {}
        self.works: dict[int, Any] = {}
        self.moment = Moment(rows, 0, 0)
        self.runtime: dict[str, np.ndarray] = {}
        for node in program.given.values():
            if node.op == "constant":
                self.values[node.id] = node.attrs["value"]
            elif node.op == "runtime":
                value = self.runtime.setdefault(node.attrs["name"], np.zeros((), np.int64))
                self.values[node.id] = value
        stored = self._stored_in_place()
        self.steps: list[Step] = []
        for index, instruction in enumerate(program.instructions):
            if instruction.node.op == "store_gradient" and instruction.node.inputs[0] in stored:
                continue  # its kernel writes it there
            step = self._prepare(index, instruction, stored)
            self.steps += [self._after(instruction.waits, step)]

    def run(self, feeds: Sequence[np.ndarray], moment: Moment) -> list[np.ndarray]:
        """Run all instructions; returns copies of the outputs."""
        self.moment = moment
        told = {"replica_id": self.replica.id, "row_offset": moment.row_offset}
        told |= {"rows": moment.rows, "step": moment.step}
        for name, array in self.runtime.items():
            array[...] = told[name]
        self.values.update(zip(self.program.inputs, feeds, strict=True))
        with np.errstate(all="ignore"):  # infinities and NaN are results here, not warnings
            for step in self.steps:
                step()
        return [self._output(node) for node in self.program.outputs]

    def _output(self, node: Node) -> np.ndarray:
        if node.id in self.values:
            return self.values[node.id].copy()
        # Left out of the null program: there are no rows of it.
        return np.zeros(concrete(node.spec.shape, 0), node.spec.dtype)

    def _stored_in_place(self) -> dict[int, np.ndarray]:
        """Find the gradients that can be computed where they are reduced, and where that is."""
        uses: dict[int, int] = {}
        for instruction in self.program.instructions:
            for i in instruction.node.inputs:
                uses[i] = uses.get(i, 0) + 1
        for node in self.program.outputs:
            uses[node.id] = uses.get(node.id, 0) + 1
        made = {each.node.id: each.node for each in self.program.instructions}
        stores: dict[int, np.ndarray] = {}
        for instruction in self.program.instructions:
            node = instruction.node
            if node.op == "store_gradient":
                gradient = made.get(node.inputs[0])
                op = None if gradient is None else lookup(gradient.op)
                if op and op.kind == "compute" and not op.view and uses[node.inputs[0]] == 1:
                    arena = self._arena(node)
                    stores[node.inputs[0]] = arena.view(arena.gradients, node.attrs["span"])
        return stores

    def _arena(self, node: Node) -> Arena:
        return self.arenas[id(node.attrs["plan"])]

    def _after(self, waits: tuple[int, ...], step: Step) -> Step:
        waits = tuple(i for i in waits if self.program.instructions[i].stream == "collective")
        if not waits:
            return step

        def run() -> None:
            for i in waits:
                self.works.pop(i).wait() if i in self.works else None
            step()

        return run

    def _prepare(self, index: int, instruction: Instruction, stored: dict[int, np.ndarray]) -> Step:
        node = instruction.node
        if lookup(node.op).kind == "compute":
            return self._compute(node, stored)
        if node.op == "all_reduce_bucket":
            return self._all_reduce(index, node)
        prepare: Callable[[Node], Step] | None = getattr(self, f"_{node.op}", None)
        if prepare is None:
            raise InternalError(f"the CPU executor cannot run {node}")
        return prepare(node)

    def _compute(self, node: Node, stored: dict[int, np.ndarray]) -> Step:
        op, values, inputs, attrs, target = (
            lookup(node.op),
            self.values,
            node.inputs,
            node.attrs,
            node.id,
        )
        kernel = op.cpu
        assert kernel is not None, node
        out = None
        if not op.view:
            out = stored.get(node.id)
            if out is None:
                out = np.empty(concrete(node.spec.shape, self.rows), node.spec.dtype)

        def run() -> None:
            values[target] = kernel(out, [values[i] for i in inputs], attrs)

        return run

    def _read(self, node: Node) -> Step:
        variable, index, copy = (
            node.attrs["variable"],
            self.replica.index,
            node.attrs.get("copy", False),
        )

        def run() -> None:
            value = variable.storage[index]
            self.values[node.id] = value.copy() if copy else value

        return run

    def _assign(self, node: Node) -> Step:
        variable, index, source = node.attrs["variable"], self.replica.index, node.inputs[0]

        def run() -> None:
            variable.storage[index][...] = self.values[source]

        return run

    def _store_gradient(self, node: Node) -> Step:
        arena, source = self._arena(node), node.inputs[0]
        place = arena.view(arena.gradients, node.attrs["span"])

        def run() -> None:
            place[...] = self.values[source]

        return run

    def _store_count(self, node: Node) -> Step:
        arena, source = self._arena(node), node.inputs[0]

        def run() -> None:
            arena.count[0] = self.values[source]

        return run

    def _clear_gradients(self, node: Node) -> Step:
        arena = self._arena(node)

        def run() -> None:
            arena.gradients[...] = 0

        return run

    def _all_reduce(self, index: int, node: Node) -> Step:
        bucket, communicator = node.attrs["bucket"], self.replica.communicator
        assert communicator is not None, "a single replica has no collectives"
        part = self._arena(node).gradients[bucket.start : bucket.stop]

        def run() -> None:
            self.works[index] = communicator.all_reduce(part, op="sum", out=part, async_op=True)

        return run

    def _update_bucket(self, node: Node) -> Step:
        arena, bucket, rule = self._arena(node), node.attrs["bucket"], node.attrs["rule"]
        part = slice(bucket.parameters_start, bucket.stop)
        parameters, gradients = arena.parameters[part], arena.gradients[part]
        slots = {name: array[part] for name, array in arena.slots.items()}
        is_first = bucket.index == 0

        def run() -> None:
            arena.iterations += is_first
            rule.update(parameters, gradients, slots, arena.count, arena.iterations)

        return run

    def _send(self, node: Node) -> Step:
        source = node.inputs[0]

        def run() -> None:
            self.rendezvous.send(self._key(node), self.values[source])

        return run

    def _receive(self, node: Node) -> Step:
        out = np.empty(concrete(node.spec.shape, self.rows), node.spec.dtype)

        def run() -> None:
            # Sends come first in issue order, so the value is there; a copy because it is another
            # device.
            np.copyto(out, self.rendezvous.receive(self._key(node), timeout=1.0))
            self.values[node.id] = out

        return run

    def _key(self, node: Node) -> Key:
        attrs = node.attrs
        return Key(
            self.replica.generation,
            self.moment.step,
            attrs["edge"],
            attrs["source"],
            attrs["destination"],
        )
