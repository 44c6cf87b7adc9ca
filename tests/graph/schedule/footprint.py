"""Find the memory that each instruction of a program reads and writes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.program_facts import stored_in_place
from allreduce.reduction import ShardMode

# Units of reads and writes: ("block", index) and ("value", node) hold values, ("gradient", plan,
# span) a gradient in the arena, ("sums", plan, bucket) the sums of the own slice if stored
# elsewhere, ("divisor", plan) the divisor of updates, ("variable", variable) a variable, ("number",
# plan) and ("iterations", plan) the counters of an arena's updates, ("communicator", "calls") the
# number of the host's calls, and ("look", node) the address of a value in another value's memory,
# or a variable's.
Region = Hashable

_UPDATES = ("update_bucket", "update_slices", "update_own")
_NORMS = ("gradient_norm", "all_reduce_norm")


@dataclass(frozen=True, slots=True)
class Access:
    """One instruction's access to a region of memory.

    Attributes:
        region: The memory.
        writes: Whether it writes.
        value: The node that must have written the value read; None if any content counts.
    """

    region: Region
    writes: bool
    value: int | None = None


def footprints(program: Program) -> list[list[Access]]:
    """List the accesses of each instruction, and last those after all have run.

    Inputs, constants and an optimizer's slots are omitted: at most one instruction writes each.
    """
    places = _Places(program)
    found = [list(places.of(each.node)) for each in program.instructions]
    return [*found, [places.reading(node.id) for node in program.outputs if node.id in places.at]]


class _Places:
    """The memory regions of a program's values."""

    def __init__(self, program: Program) -> None:
        blocks = {i: index for index, each in enumerate(program.blocks or ()) for i in each.values}
        self.stored = stored_in_place(program)
        self.at: dict[int, tuple[Region, int]] = {}  # of each value: its place and its writer
        self._sent: dict[tuple[object, object], int] = {}
        self._looks: set[int] = set()
        for instruction in program.instructions:
            node, op = instruction.node, lookup(instruction.node.op)
            if op.view is not None or node.op == "scan_result":
                if node.inputs[0] in self.at:
                    self.at[node.id] = self.at[node.inputs[0]]
            elif node.op == "read" and not node.attrs.get("copy"):
                self.at[node.id] = ("variable", node.attrs["variable"]), node.id
            elif node.id in self.stored:
                self.at[node.id] = _gradient(self.stored[node.id]), node.id
            elif node.id in blocks:
                self.at[node.id] = ("block", blocks[node.id]), node.id
            elif op.kind != "effect":
                self.at[node.id] = ("value", node.id), node.id
            if node.op == "send" and node.inputs:
                self._sent[node.attrs["edge"], node.attrs["destination"]] = node.inputs[0]

    def reading(self, value: int) -> Access:
        region, writer = self.at[value]
        return Access(region, False, writer)

    def _looking(self, node: Node) -> Iterator[Access]:
        """List the values whose addresses an instruction reads or sets."""
        yield from (Access(("look", i), False) for i in node.inputs if i in self._looks)
        reads = node.op == "read" and not node.attrs.get("copy")
        if reads or node.op == "scan_result" or lookup(node.op).view is not None:
            self._looks.add(node.id)
            yield Access(("look", node.id), True)

    def of(self, node: Node) -> Iterator[Access]:
        """List the reads and writes of one instruction."""
        op = lookup(node.op)
        yield from self._looking(node)
        for i in node.inputs:
            if i in self.at and not (node.op == "store_gradient" and i in self.stored):
                yield self.reading(i)
        if op.view is not None or node.op == "scan_result":
            return
        if node.op == "receive":  # a task's own sender lends the value until it is copied here
            sent = self._sent.get((node.attrs["edge"], node.attrs["destination"]))
            if sent in self.at:
                yield self.reading(sent)
        if node.op == "read":
            yield Access(("variable", node.attrs["variable"]), False, node.id)
        for region in _changed(node):
            yield Access(region, True)
        # One thread issues those of other devices, and each device's stream orders its own.
        if op.kind == "collective" and (node.device is None or node.device.on_host):
            yield Access(("communicator", "calls"), True)
        yield from _counting(node)
        if node.op in (*_UPDATES, *_NORMS, "reduce_scatter_bucket"):
            yield from (Access(region, False) for region in _added(node))
        elif (node.id in self.at and node.op not in ("read", "send")) or node.attrs.get("copy"):
            yield Access(self.at[node.id][0], True, node.id)


def _changed(node: Node) -> Sequence[Region]:
    """List the regions that an instruction changes besides its own value."""
    if node.op in ("all_reduce_bucket", "sum_slices"):
        return _gradients(node)
    if node.op == "reduce_scatter_bucket":
        return [_sums(node)]
    if node.op == "store_gradient":
        return [_gradient(node)]
    if node.op in _NORMS:
        return [_divisor(node)]
    if node.op == "store_count":
        return [("count", id(node.attrs["plan"]))]
    if node.op == "clear_gradients":
        plan = node.attrs["plan"]
        spans = range(len(plan.layout.spans))
        return [("count", id(plan)), *(("gradient", id(plan), each) for each in spans)]
    return [("variable", each) for each in node.attrs.get("changes", ())]


def _counting(node: Node) -> Iterator[Access]:
    """List an instruction's uses of the counters of an arena's updates."""
    if node.op not in ("all_reduce_bucket", *_UPDATES):
        return
    plan, leads = id(node.attrs["plan"]), node.attrs["bucket"].has_header
    if node.op in ("update_bucket", "update_own"):
        yield Access(("iterations", plan), leads)
    elif node.op == "update_slices":
        yield Access(("number", plan), False)
    elif leads:
        yield Access(("iterations", plan), False)
        yield Access(("number", plan), True)


def _gradient(node: Node) -> Region:
    return "gradient", id(node.attrs["plan"]), node.attrs["span"]


def _divisor(node: Node) -> Region:
    return "divisor", id(node.attrs["plan"])


def _sums(node: Node) -> Region:
    return "sums", id(node.attrs["plan"]), node.attrs["bucket"].index


def _added(node: Node) -> list[Region]:
    """List the gradients, or their sums, that an instruction reads."""
    plan = node.attrs["plan"]
    if node.op in _NORMS:
        gradients = [("gradient", id(plan), each) for each in range(len(plan.layout.spans))]
        scattered = [i for i, mode in plan.sharded.items() if mode is ShardMode.SCATTERED]
        return [("count", id(plan)), *gradients, *(("sums", id(plan), i) for i in scattered)]
    clips = node.op in _UPDATES and node.attrs["rule"].clip_norm is not None
    divisor = [_divisor(node)] if clips else []
    if node.op == "update_own" and node.attrs["mode"] is ShardMode.SCATTERED:
        return [("count", id(plan)), _sums(node), *divisor]
    return [*_gradients(node), *divisor]


def _gradients(node: Node) -> list[Region]:
    """List the parts of a bucket; every update reads the count, which is in the first bucket."""
    plan, bucket = id(node.attrs["plan"]), node.attrs["bucket"]
    counts = bucket.has_header or node.op in _UPDATES
    spans = range(bucket.first, bucket.last)
    return [*([("count", plan)] if counts else []), *(("gradient", plan, each) for each in spans)]
