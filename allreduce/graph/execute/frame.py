"""The buffers, arenas and communicators that the instructions of one program read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import numpy as np

from allreduce.comm import Communicator, Work
from allreduce.devices import Device, DeviceName, options
from allreduce.devices import lookup as lookup_device
from allreduce.graph.consistency.rank_check import Facts
from allreduce.graph.core.node import Node
from allreduce.graph.core.spec import Shape, concrete
from allreduce.graph.execute.memory import Memory
from allreduce.graph.execute.outputs import Outputs
from allreduce.graph.execute.queues import Queues
from allreduce.graph.execute.timing import Clock
from allreduce.graph.partition.rendezvous import Rendezvous
from allreduce.graph.schedule.program_facts import ProgramFacts
from allreduce.graph.schedule.streams import COMPUTE
from allreduce.graph.trace.replica import Replica, StepInfo
from allreduce.graph.update.step_checksum import StepChecksum
from allreduce.reduction import Arena

Step = Callable[[], None]


class Loop(Protocol):
    """Runs a scan's body once per element."""

    def run(self) -> None: ...
    def result(self, index: int) -> np.ndarray: ...


class Frame:
    """A program's memory on one replica, for one batch size.

    Args:
        facts: The program and the facts derived from it.
        rendezvous: Exchanges values between the replica's devices.
        info: The first step; later ones have the same numbers of rows.
        summary: The facts that all ranks must share; None with one rank.
        concurrent: Whether several threads run instructions; values then share no memory.
        returns: Whether the program's outputs go to the caller.

    Attributes:
        values: Each node's value, by the node's id.
        works: Collectives that were started and not awaited, by node.
        received: What is to be done when a collective has ended, by node.
        clocks: This step's collectives, by node.
        loops: The scans, by node.
        in_place: Gradients that are computed directly in an arena, by node.
        serial: Whether each collective ends before anything else happens, as in a first step that
            loads kernels, which waits for the device.
        watches: Whether each value is checked for NaN and infinity.
        syncs: Whether each instruction ends before the next starts.
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
        concurrent: bool = False,
        returns: bool = True,
    ) -> None:
        self.facts, self.program = facts, facts.program
        self.replica = replica
        self.arenas = arenas
        self.rendezvous = rendezvous
        self.summary = summary
        self.info = info
        self.checksums: dict[int, StepChecksum] = {}  # by id of the plan
        self.values: dict[int, np.ndarray] = {}
        self.works: dict[int, Work] = {}
        self.received: dict[int, Callable[[], None]] = {}
        self.clocks: dict[int, Clock] = {}
        self.loops: dict[int, Loop] = {}
        self.samples: dict[int, Any] = {}  # of values that a step makes, while it is bound
        self.runtime: dict[str, np.ndarray] = {}
        self._total_rows = sum(info.rows_per_replica or ())
        self.watches = options.current().check_numerics
        self.syncs = options.current().sync_errors
        checked = self.watches or self.syncs
        self.queues = Queues(
            *(facts, self.device, self.values, arenas),
            at_once=checked,
            communicator=replica.communicator,
        )
        self.serial = False
        self.bind_constants()
        self._bring_constants()
        # Gradients that are computed where they are reduced.
        self.in_place = {value: self.gradient(node) for value, node in facts.stored.items()}
        planned = replace(self.program, blocks=None) if concurrent else self.program
        self.outputs = Outputs(
            *(planned, self.in_place, self.shape, self.device, rendezvous), zero_copy=returns
        )
        elsewhere = {*self.in_place, *self.outputs.output_nodes, *self.outputs.arriving}
        self.memory = Memory(planned, elsewhere, self.shape, self.device)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + self.memory.apart + self.outputs.nbytes

    @property
    def communicator(self) -> Communicator:
        """The replica's communicator; only programs with several replicas have collectives."""
        assert self.replica.communicator is not None, "a single replica has no collectives"
        return self.replica.communicator

    def bind_constants(self) -> None:
        """Give constants, and numbers that change from step to step, their arrays."""
        for node in self.program.given.values():
            if node.op == "constant":
                self.values[node.id] = node.attrs["value"]
            elif node.op == "runtime":
                value = self.runtime.setdefault(node.attrs["name"], np.zeros((), np.int64))
                self.values[node.id] = value

    def _bring_constants(self) -> None:
        """Copy constants to devices that cannot read the host's memory."""
        self._brought: dict[tuple[int, DeviceName], int] = {}
        for node in [each.node for each in self.program.instructions]:
            if node.device is None or node.device.on_host:
                continue
            for i in node.inputs:
                given = self.program.given.get(i)
                if given is None or given.op == "placeholder" or (i, node.device) in self._brought:
                    continue
                place = self._brought[i, node.device] = -1 - len(self._brought)
                if given.op == "constant":
                    self.values[place] = self.constant(node, given.attrs["value"])

    def upload_step_numbers(self) -> None:
        """Copy the step's numbers to devices that cannot read the host's memory."""
        for (i, name), place in self._brought.items():
            if self.program.given[i].op == "runtime":
                device = self.device(name)
                self.values[place] = device.number(self.values[i], device.own(COMPUTE))

    def inputs(self, node: Node) -> tuple[int, ...]:
        """Return the places of a node's inputs in `values`, on its device."""
        if node.device is None or not self._brought:
            return node.inputs
        return tuple(self._brought.get((i, node.device), i) for i in node.inputs)

    def sample(self, node: Node, i: int) -> Any:
        """Return an array like an input of a node on a device, for `Queues.rehearse`."""
        if i in self.values:
            return self.values[i]
        if i not in self.samples:
            assert node.device is not None, node
            made = self.facts.nodes.get(i) or self.program.given.get(i)
            shape, dtype = ((), np.int64) if made is None else (made.spec.shape, made.spec.dtype)
            self.samples[i] = self.blank(node.device, shape, dtype)
        return self.samples[i]

    def blank(self, name: DeviceName, shape: Shape, dtype: Any) -> Any:
        """Return an array on one of the replica's devices for `Stream.rehearse`."""
        return self.device(name).blank(self.sizes(shape), dtype)

    def constant(self, node: Node, value: np.ndarray) -> Any:
        """Return a host array as one of a node's device."""
        assert node.device is not None, node
        return self.device(node.device).constant(value)

    def new_array(self, node: Node) -> Callable[[], Any]:
        """Return a function that allocates an array for a node's value, in each step."""
        assert node.device is not None, node
        device, shape, dtype = self.device(node.device), self.shape(node), node.spec.dtype
        if device.reads_host:
            return lambda: np.empty(shape, dtype)
        nbytes = prod(shape) * dtype.itemsize
        return lambda: device.allocate(nbytes, zero=False).array(dtype, shape)

    def arena(self, node: Node) -> Arena:
        """Return the arena of a node's optimizer."""
        return self.arenas[id(node.attrs["plan"])]

    def gradient(self, node: Node) -> np.ndarray:
        """Return the part of the arena that a node stores a gradient to."""
        arena = self.arena(node)
        return arena.view(arena.gradients, node.attrs["span"])

    def buffer(self, node: Node) -> np.ndarray:
        """Return the memory for a node's value."""
        return self.memory.array(node)

    def device(self, name: DeviceName) -> Device:
        """Return the replica's device of this name in the program."""
        return lookup_device(self.replica.places.names[name])

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a node's value in this frame's steps."""
        return self.sizes(node.spec.shape)

    def sizes(self, shape: Shape) -> tuple[int, ...]:
        """Replace named sizes by their values in this frame's steps."""
        return concrete(shape, self.info.rows, self._total_rows)

    def checksum(self, node: Node) -> StepChecksum | None:
        """Return the checksum in an arena's header that compares this step between ranks."""
        communicator, arena = self.replica.communicator, self.arena(node)
        if self.summary is None or communicator is None or not node.attrs["bucket"].has_header:
            return None
        key, rule, layout = id(node.attrs["plan"]), node.attrs["rule"], arena.layout
        if key not in self.checksums:
            place, brought = arena.gradients[1 : layout.header], self.replica.rank_digest
            self.checksums[key] = StepChecksum(
                self.summary, rule, layout, place, communicator, brought
            )
        return self.checksums[key]

    def release(self) -> None:
        """Free all memory at once, whatever still refers to the frame.

        Instructions refer to their frame; without this, memory would stay until the garbage
        collector runs, or as long as a traceback of a failed step is kept.
        """
        self.queues.stop()
        vars(self).clear()
