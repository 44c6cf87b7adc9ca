"""A program bound to memory: a Python function per instruction, for one batch size."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from allreduce import events
from allreduce.comm import Work
from allreduce.devices import Device, DeviceName, options
from allreduce.devices import lookup as lookup_device
from allreduce.graph.consistency.rank_check import Facts
from allreduce.graph.core.host_future import Output
from allreduce.graph.core.inter_op_pool import Team
from allreduce.graph.core.node import Node
from allreduce.graph.core.spec import Shape, concrete
from allreduce.graph.execute.instructions import Step, build
from allreduce.graph.execute.instrument import look_at
from allreduce.graph.execute.loop import Loop
from allreduce.graph.execute.memory import Memory
from allreduce.graph.execute.native_replay import Replay, is_replayable
from allreduce.graph.execute.outputs import Outputs
from allreduce.graph.execute.queues import Queues
from allreduce.graph.execute.reports import Clock, Recent, Took, reported, timed, wait_for
from allreduce.graph.partition.rendezvous import Rendezvous
from allreduce.graph.schedule.program import Instruction
from allreduce.graph.schedule.program_facts import ProgramFacts
from allreduce.graph.schedule.streams import COLLECTIVE
from allreduce.graph.trace.replica import Moment, Replica
from allreduce.graph.update.step_checksum import Stamp
from allreduce.reduction import Arena

# So often a frame is bound to arrays anew, as where a batch is strided at times.
_MOST_REPLAYS = 4
# Of Python's objects and native ones: 650 to 860 were measured, beside the values.
_INSTRUCTION_BYTES = 1024


class Frame:
    """A program bound to buffers of one batch size.

    Args:
        facts: The program to run, and what follows from it.
        replica: Who runs it.
        arenas: The replica's arenas, by id of their plan.
        rendezvous: Where transfers between the replica's devices meet.
        moment: The first step that it is for; others have the same rows.
        outline: What all ranks have to run alike; None where there is one rank.
        threads: How many run instructions that do not depend on each other.
        returns: Whether a caller gets what it computes.

    Attributes:
        nbytes: What it takes, about; of what is lent to the caller, one copy.
    """

    def __init__(
        self,
        facts: ProgramFacts,
        replica: Replica,
        arenas: Mapping[int, Arena],
        rendezvous: Rendezvous,
        moment: Moment,
        outline: Facts | None,
        threads: int = 1,
        returns: bool = True,
    ) -> None:
        self.facts, self.program = facts, facts.program
        self.replica = replica
        self.arenas = arenas
        self.rendezvous = rendezvous
        self.outline = outline
        self.stamps: dict[int, Stamp] = {}  # by id of the plan
        self.values: dict[int, np.ndarray] = {}
        self.works: dict[int, Work] = {}  # started and not awaited, by node
        self.clocks: dict[int, Clock] = {}  # of this step's collectives, by node
        self.took: Took | None = None  # by the latest step that has ended well
        self.recent = Recent()
        self.loops: dict[int, Loop] = {}  # by the node of the scan
        self.moment = moment
        self._everyones_rows = sum(moment.everyone or ())
        self._watches = options.current().check_numerics
        self.syncs = options.current().sync_errors
        self.runtime: dict[str, np.ndarray] = {}
        looks = self._watches or self.syncs
        self.queues = Queues(facts, self.device, self.values, arenas, looks)
        self._give()
        threads = 1 if self.queues.any else min(threads, sum(facts.free))
        self._lay_out(returns, threads > 1)
        self._parts = [self._part(each) for each in self.program.instructions]
        self._bind = partial(self._at_once, threads) if threads > 1 else self._in_order
        self.steps = self._bind(self._parts)
        self.nbytes: int = self.memory.nbytes + self.memory.apart + self.outputs.nbytes
        self.nbytes += sum(loop.nbytes for loop in self.loops.values())
        self.nbytes += _INSTRUCTION_BYTES * len(self._parts)
        self._told: list[Step] | None = None  # the same with reports, once somebody has listened
        self._replay: Replay | None = None  # the same in native code, once a step has run
        watched = self._watches or self.syncs or threads > 1 or self.queues.any
        self._replays_left = 0 if watched else _MOST_REPLAYS

    def _lay_out(self, returns: bool, at_once: bool) -> None:
        """Choose where values lie: of those that may be made at once, none share memory."""
        program = self.program
        # Gradients that are computed where they are reduced.
        stored = {} if self.syncs else self.facts.stored
        self.in_place = {value: self.gradient(node) for value, node in stored.items()}
        # With what is looked for beside values, these lie in the frame's memory.
        lends = returns and not self.syncs
        self.outputs = Outputs(program, self.in_place, self.shape, self.device, lends)
        planned = replace(program, blocks=None) if at_once else program
        elsewhere = {*self.in_place, *self.outputs.lent}
        self.memory = Memory(planned, elsewhere, self.shape, self.device, self.syncs)

    def _part(self, instruction: Instruction) -> Step:
        node = instruction.node
        if self._is_made(node):
            return _nothing
        step = build(self, node)
        return timed(self, node, step) if instruction.stream.kind == COLLECTIVE else step

    def _in_order(self, made: Sequence[Step]) -> list[Step]:
        """Have one thread run the instructions, or give them to devices beside the host."""
        pairs = zip(self.facts.awaited, made, strict=True)
        if self.queues.any:
            return [
                self.queues.ordered(index, self._after(waits, step))
                for index, (waits, step) in enumerate(pairs)
            ]
        return [self._after(waits, step) for waits, step in pairs if step is not _nothing]

    def _at_once(self, threads: int, made: Sequence[Step]) -> list[Step]:
        """Have several run those that do not depend on each other."""
        # Which waits are covered by earlier ones' holds for one thread only.
        steps = [
            self._after(self.facts.collectives(each.node.before), step)
            for each, step in zip(self.program.instructions, made, strict=True)
        ]
        return [Team(steps, self.facts.after, self.facts.free, threads, self.replica.runs).run]

    def _give(self) -> None:
        for node in self.program.given.values():
            if node.op == "constant":
                self.values[node.id] = node.attrs["value"]
            elif node.op == "runtime":
                value = self.runtime.setdefault(node.attrs["name"], np.zeros((), np.int64))
                self.values[node.id] = value

    def _begin(self) -> None:
        """Leave alone what the step before may still read on a device beside the host."""
        self.queues.begin()
        self.runtime.clear()
        self._give()

    def run(self, feeds: Sequence[np.ndarray], moment: Moment) -> list[Output]:
        """Run all instructions; returns the outputs, in memory that is the caller's."""
        self.moment = moment
        began = time.perf_counter()
        self.clocks = {}
        if self.queues.any:
            self._begin()
        for name, array in self.runtime.items():
            array[...] = self.replica.id if name == "replica" else getattr(moment, name)
        # What is somewhere else in each step.
        moving = {**dict(zip(self.program.inputs, feeds, strict=True)), **self.outputs.lend()}
        self.values.update(moving)
        steps = self._chosen(list(moving.values()))
        try:
            with np.errstate(all="ignore"):  # infinities and NaN are results here, not warnings
                for step in steps:
                    step()
        except BaseException as error:
            self._leave(error)
            self.queues.stop()
            self._forget()
            raise
        for started in list(self.works):  # what is fetched straight from a collective
            self.end(started)
        if self.queues.any:
            self.queues.end()
        self.took = self.recent.note(Took(began, time.perf_counter(), self.clocks))
        outputs = self.outputs.of(self.values)
        if steps is self.steps and self._replays_left:
            self._record(moving)
        self._forget()
        return outputs

    def _forget(self) -> None:
        """Let go of a batch, which may be large, and is the caller's, and of what it gets."""
        for i in (*self.program.inputs, *self.outputs.passing):
            self.values.pop(i, None)

    def _chosen(self, moving: list[np.ndarray]) -> list[Step]:
        """Choose how to run a step: native code tells nobody about single instructions."""
        if events.heard():
            return self._heard()
        if self._replay is not None and self._replay.begin(moving):
            return self._replay.steps
        return self.steps

    def _record(self, moving: Mapping[int, np.ndarray]) -> None:
        """Bind what native code can do to the arrays of the step that has just run."""
        if not is_replayable(moving, self):
            return
        self._replays_left -= 1
        parts = [None if part is _nothing else part for part in self._parts]
        try:
            self._replay = Replay(self, moving, parts, self.facts.awaited)
        except MemoryError:  # the step has been done, and others can be without this
            self._replay = None

    def _heard(self) -> list[Step]:
        """Bind the instructions so that each reports how long it takes."""
        if self._told is None:
            pairs = zip(self.program.instructions, self._parts, strict=True)
            self._told = self._bind(
                [step if step is _nothing else reported(self, each, step) for each, step in pairs]
            )
        return self._told

    def _leave(self, error: BaseException) -> None:
        """After an error that all ranks raise, see to it that nothing writes into the next step."""
        if getattr(error, "everywhere", False):
            for work in self.works.values():
                work.wait()
        self.works.clear()

    def _is_made(self, node: Node) -> bool:
        """Say whether a node has nothing to do: what it stores was computed where it goes."""
        return node.op == "store_gradient" and node.inputs[0] in self.in_place

    def arena(self, node: Node) -> Arena:
        """Return where the optimizer of a node has its arrays."""
        return self.arenas[id(node.attrs["plan"])]

    def gradient(self, node: Node) -> np.ndarray:
        """Return where the gradient that a node stores is reduced."""
        arena = self.arena(node)
        return arena.view(arena.gradients, node.attrs["span"])

    def _after(self, waits: Sequence[int], step: Step) -> Step:
        """Put the waits for collectives before a step; all else has ended when it runs."""
        if not waits:
            return step

        def run() -> None:
            for i in waits:
                self.end(i)
            step()

        return run

    def end(self, collective: int) -> None:
        """Wait for a collective, if it is one that no other instruction has waited for."""
        if collective not in self.works:
            return
        ended = [collective]
        if self._watches:
            # They end in the order in which they started: who reads an earlier one does not wait
            # for it again, so that it is looked at now.
            started = list(self.works)
            ended = started[: started.index(collective) + 1]
        for each in ended:
            wait_for(self, self.facts.nodes[each], self.works.pop(each))
            if self._watches:
                look_at(self, self.facts.nodes[each])

    def release(self) -> None:
        """Let go of all memory at once.

        Steps know their frame, so that the memory would wait for the collector, and as long as
        anybody holds the traceback of an error that ended a step.
        """
        self.queues.stop()
        for loop in self.loops.values():
            loop.release()
        vars(self).clear()

    def inside(self, scan: Node) -> Frame:
        """Bind the program that a scan of this one repeats."""
        facts = self.facts.of_body(scan)
        return Frame(facts, self.replica, {}, self.rendezvous, self.moment, None, returns=False)

    def buffer(self, node: Node) -> np.ndarray:
        """Make room for a node's value."""
        return self.memory.array(node)

    def device(self, name: DeviceName) -> Device:
        """Return the replica's device that its program calls by a name."""
        return lookup_device(self.replica.places.names[name])

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a node's value in this frame's steps."""
        return self.sizes(node.spec.shape)

    def sizes(self, shape: Shape) -> tuple[int, ...]:
        """Give named sizes the values that they have in this frame's steps."""
        return concrete(shape, self.moment.rows, self._everyones_rows)

    def stamp(self, node: Node) -> Stamp | None:
        """Return what makes sure, with an arena's header, that ranks do alike."""
        communicator, arena = self.replica.communicator, self.arena(node)
        if self.outline is None or communicator is None or not node.attrs["bucket"].has_header:
            return None
        key, rule, layout = id(node.attrs["plan"]), node.attrs["rule"], arena.layout
        if key not in self.stamps:
            place, brought = arena.gradients[1 : layout.header], self.replica.fingerprint
            self.stamps[key] = Stamp(self.outline, rule, layout, place, communicator, brought)
        return self.stamps[key]


def _nothing() -> None:
    pass
