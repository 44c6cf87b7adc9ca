"""A program bound to memory: its instructions as Python functions, for one batch size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from allreduce import events
from allreduce.devices import COLLECTIVE, on_host, options
from allreduce.errors import InternalError
from allreduce.graph.consistency.rank_check import Facts
from allreduce.graph.core.host_future import Output
from allreduce.graph.core.node import Node
from allreduce.graph.execute.frame import Frame, Step
from allreduce.graph.execute.instructions import build
from allreduce.graph.execute.inter_op_pool import InterOpPool
from allreduce.graph.execute.native_replay import NativeReplay, is_replayable
from allreduce.graph.execute.reports import end, order, reported, timed
from allreduce.graph.execute.scan_loop import ScanLoop
from allreduce.graph.execute.timing import Clock, StepTiming
from allreduce.graph.partition.rendezvous import Rendezvous
from allreduce.graph.schedule.program import Instruction
from allreduce.graph.schedule.program_facts import ProgramFacts
from allreduce.graph.trace.replica import Replica, StepInfo
from allreduce.reduction import Arena

# How often a program is bound to new arrays for native replay, as when a batch is strided at times.
_MOST_REPLAYS = 4
_MOST_TIMINGS = 64  # of the latest steps, for their median
# Instructions of micro-batches that do not wait for the last of an update.
_EVERY_TIME = ("store_gradient", "store_count", "clear_gradients")
# Python and native objects of one instruction, without values: 650 to 860 were measured.
_INSTRUCTION_BYTES = 1024
_PLAIN = {np.ndarray}


class BoundProgram:
    """A program bound to buffers of one batch size.

    Args:
        threads: The number of threads that run independent instructions; the other arguments are
            those of `Frame`.

    Attributes:
        timing: The timing of the latest successful step.
        communicated: The timing of the latest one with collectives.
        recent: The durations of the latest steps, by whether they used pipelining.
        nbytes: Approximate size in bytes; an output that the caller keeps counts once.
    """

    def __init__(
        self,
        facts: ProgramFacts,
        replica: Replica,
        arenas: Mapping[int, Arena],
        rendezvous: Rendezvous,
        info: StepInfo,
        summary: Facts | None,
        threads: int = 1,
        returns: bool = True,
    ) -> None:
        threads = 1 if facts.beside_host else min(threads, sum(facts.free))
        self.frame = frame = Frame(
            *(facts, replica, arenas, rendezvous, info, summary),
            concurrent=threads > 1,
            returns=returns,
        )
        self.program = facts.program
        self.timing: StepTiming | None = None
        self.communicated: StepTiming | None = None
        self.recent = {how: deque[float](maxlen=_MOST_TIMINGS) for how in (True, False)}
        self._bind_scans()
        self._parts = [self._part(each) for each in self.program.instructions]
        self._bind = partial(self._at_once, threads) if threads > 1 else self._in_order
        self.steps = self._bind(self._parts)
        frame.samples.clear()
        frame.serial = not frame.queues.loaded
        if frame.queues.any:  # memory that the first step finds
            frame.upload_step_numbers()
            frame.outputs.allocate()
        self.nbytes: int = frame.nbytes + _INSTRUCTION_BYTES * len(self._parts)
        self.nbytes += sum(each.nbytes for each in self._loops)
        self.nbytes += sum(each.nbytes for each in self._bodies)
        self._reported: list[Step] | None = None  # made at the first step that has subscribers
        self._replay: NativeReplay | None = None  # made after the first step
        # Runs a step that needs no Python, which saves 7 calls of functions; None if there is none.
        self._step: Callable[[list[Any]], list[Output] | None] | None = None
        watched = frame.watches or frame.syncs or threads > 1 or frame.queues.any
        self._replays_left = 0 if watched else _MOST_REPLAYS

    def _bind_scans(self) -> None:
        """Bind the body of each scan."""
        frame = self.frame
        self._loops: list[ScanLoop] = []
        self._bodies: list[BoundProgram] = []
        for node in [each.node for each in self.program.instructions if each.node.op == "scan"]:
            facts, replica = frame.facts.of_body(node), frame.replica
            body = BoundProgram(
                facts, replica, {}, frame.rendezvous, frame.info, None, returns=False
            )
            loop = ScanLoop(frame, node, body.frame, body.steps)
            frame.loops[node.id] = loop
            self._loops.append(loop)
            self._bodies.append(body)

    def _part(self, instruction: Instruction) -> Step:
        node, frame = instruction.node, self.frame
        if node.op == "store_gradient" and node.inputs[0] in frame.in_place:
            return _nothing
        step = build(frame, node)
        step = timed(frame, node, step) if instruction.stream.kind == COLLECTIVE else step
        return last_only(frame, node, step)

    def _in_order(self, made: Sequence[Step]) -> list[Step]:
        """Have one thread run the instructions, or issue them to device streams."""
        pairs = zip(self.frame.facts.awaited, made, strict=True)
        if self.frame.queues.any:
            return [
                self.frame.queues.ordered(index, self._behind(index, waits, step))
                for index, (waits, step) in enumerate(pairs)
            ]
        return [self._after(waits, step) for waits, step in pairs if step is not _nothing]

    def _at_once(self, threads: int, made: Sequence[Step]) -> list[Step]:
        """Have several threads run independent instructions."""
        facts, replica = self.frame.facts, self.frame.replica
        # `facts.awaited` omits waits that earlier instructions cover, which assumes one thread.
        steps = [
            self._after(facts.collectives(each.node.before), step)
            for each, step in zip(self.program.instructions, made, strict=True)
        ]
        return [InterOpPool(steps, facts.after, facts.free, threads, replica.runs).run]

    def _behind(self, index: int, waits: Sequence[int], step: Step) -> Step:
        """Return `step` so that the stream that it runs on first waits for collectives."""
        if not waits:
            return step
        frame, stream = self.frame, self.frame.queues.reader(index)

        def run() -> None:
            for i in waits:
                order(frame, i, stream)
            step()

        return run

    def _after(self, waits: Sequence[int], step: Step) -> Step:
        """Return `step` so that it first waits for collectives."""
        if not waits:
            return step
        frame = self.frame

        def run() -> None:
            for i in waits:
                end(frame, i)
            step()

        return run

    def run(self, feeds: Sequence[Any], info: StepInfo) -> list[Output]:
        """Run all instructions; returns the outputs, in memory that belongs to the caller."""
        began = time.perf_counter()
        if self._step is not None and not events.has_subscribers():
            made = self._step([*feeds])
            if made is not None:
                self._note(began, {})
                return made
        frame = self.frame
        frame.info = info
        frame.clocks = {}
        if frame.queues.any:  # a device may still read the previous step's numbers
            frame.queues.begin()
            frame.runtime.clear()
            frame.bind_constants()
        for name, array in frame.runtime.items():
            array[...] = frame.replica.id if name == "replica" else getattr(info, name)
        if frame.queues.any:
            frame.upload_step_numbers()
        # Arrays that are in another place in each step.
        moving = dict(zip(self.program.inputs, self.place(feeds), strict=True))
        moving.update(frame.outputs.allocate())
        frame.values.update(moving)
        steps = self._chosen(list(moving.values()))
        try:
            self._perform(steps)
        except BaseException as error:
            self._abandon(error)
            try:
                frame.queues.stop()
            except InternalError as lost:  # a device repeats an error, and may report a late one
                error.add_note(f"then: {lost}")
            self._drop_moving()
            raise
        if frame.works:
            self._finish()
        frame.serial = False
        if frame.queues.any:
            frame.queues.end()
        self._note(began, frame.clocks)
        outputs = frame.outputs.of(frame.values)
        if steps is self.steps and self._replays_left:
            self._record(moving)
        self._drop_moving()
        return outputs

    def _note(self, began: float, clocks: Mapping[int, Clock]) -> None:
        """Record the timing of a step that ends now."""
        ended = time.perf_counter()
        self.timing = StepTiming(began, ended, clocks)
        self.recent[options.current().pipelining].append(ended - began)
        if clocks:
            self.communicated = self.timing

    def is_placed(self, feeds: Sequence[Any]) -> bool:
        """Return whether `place` would copy nothing to a device."""
        fed, queues = self.frame.facts.fed, self.frame.queues
        pairs = zip(self.program.inputs, feeds, strict=True)
        return all(queues.accepts(fed[i], feed) for i, feed in pairs if i in fed)

    def place(self, feeds: Sequence[Any]) -> Sequence[Any]:
        """Return a step's inputs where the program reads them; copies are complete on return.

        Copies take memory and may load kernels, which no replica may do while another's step runs.
        """
        facts = self.frame.facts
        if not facts.fed and set(map(type, feeds)) <= _PLAIN:
            return feeds
        placed = []
        for i, feed in zip(self.program.inputs, feeds, strict=True):
            if i in facts.fed:
                placed.append(self.frame.queues.place(facts.fed[i], feed))
            else:
                placed.append(on_host(feed, self._argument) if i in facts.host_inputs else feed)
        return placed

    def _argument(self) -> str:
        return f"an argument of replica {self.frame.replica.id}'s step"

    def _finish(self) -> None:
        """Wait for collectives whose results are fetched directly, or order later steps behind."""
        frame = self.frame
        for started in list(frame.works):
            if frame.queues.enqueues(frame.facts.nodes[started]) and not events.has_subscribers():
                frame.queues.join(frame.works.pop(started))
            else:
                end(frame, started)

    def _drop_moving(self) -> None:
        """Drop references to the batch and the outputs, which belong to the caller."""
        for i in (*self.program.inputs, *self.frame.outputs.passing):
            self.frame.values.pop(i, None)

    def _chosen(self, moving: list[np.ndarray]) -> list[Step]:
        """Choose how to run a step: native replay does not report single instructions."""
        if events.has_subscribers():
            return self._with_reports()
        if self._replay is not None and self._replay.begin(moving):
            return self._replay.steps
        return self.steps

    def _perform(self, steps: list[Step]) -> None:
        """Run a step's functions."""
        replay = self._replay
        if replay is not None and steps is replay.steps and replay.is_whole:
            for step in steps:
                step()
            return
        # NumPy computes something. Infinities and NaN are results here, not warnings; the switch
        # takes 2 µs.
        with np.errstate(all="ignore"):
            for step in steps:
                step()

    def _record(self, moving: Mapping[int, np.ndarray]) -> None:
        """Bind native code to the arrays of the step that has just run."""
        if not is_replayable(moving, self.frame):
            return
        self._replays_left -= 1
        parts = [None if part is _nothing else part for part in self._parts]
        try:
            self._replay = NativeReplay(self.frame, moving, parts, self.frame.facts.awaited)
            self._step = self._replay.step
        except MemoryError:  # the step has succeeded, and later ones can run without a replay
            self._replay = self._step = None

    def _with_reports(self) -> list[Step]:
        """Bind the instructions so that each reports its duration."""
        if self._reported is None:
            pairs = zip(self.program.instructions, self._parts, strict=True)
            self._reported = self._bind(
                [
                    step if step is _nothing else reported(self.frame, each, step)
                    for each, step in pairs
                ]
            )
        return self._reported

    def _abandon(self, error: BaseException) -> None:
        """After an error on all ranks, wait for collectives, which write into the next step."""
        if getattr(error, "everywhere", False):
            for work in self.frame.works.values():
                work.wait()
        self.frame.works.clear()

    def release(self) -> None:
        """Free all memory at once; see `Frame.release`."""
        self.frame.release()
        for loop in self._loops:
            loop.release()
        for body in self._bodies:
            body.release()
        vars(self).clear()


def _nothing() -> None:
    pass


def last_only(frame: Frame, node: Node, step: Step) -> Step:
    """Return an instruction so that it runs only in the last of an update's micro-batches."""
    if "adds" not in node.attrs or node.op in _EVERY_TIME:
        return step
    arena = frame.arena(node)
    counts = node.op == "all_reduce_bucket" and node.attrs["bucket"].has_header
    checksum = frame.checksum(node) if counts else None

    def run() -> None:
        if arena.completes:
            step()
        elif checksum is not None:
            checksum.note(arena)

    return run
