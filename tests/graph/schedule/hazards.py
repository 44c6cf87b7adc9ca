"""Prove that a program's instructions are ordered safely, however far its streams run apart.

Vector clocks (`allreduce.graph.schedule.clocks`) define happens-before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from allreduce.graph.schedule.clocks import Clock, clocks
from allreduce.graph.schedule.program import Program
from allreduce.graph.schedule.streams import StreamName
from tests.graph.schedule.footprint import Access, Region, footprints


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two unordered accesses, or a value that is overwritten before it is read.

    Attributes:
        first: The index of the instruction that is issued first.
        second: The index of the other one; the number of instructions stands for the step's end.
        region: The memory that both access.
        why: The kind of hazard.
    """

    first: int
    second: int
    region: Region
    why: str

    def __str__(self) -> str:
        return f"instructions {self.first} and {self.second}, {self.region}: {self.why}"


def hazards(program: Program) -> list[Hazard]:
    """Find unordered conflicting accesses, and values that are overwritten before they are read.

    Two accesses conflict if one of them writes and they use the same memory, or blocks that may
    share memory because they are in use at different times.
    """
    times = clocks(program.instructions)
    uses = footprints(program)
    return [*_conflicts(program, times, uses), *_overlaps(program, times, uses)]


@dataclass(slots=True)
class _History:
    """The accesses to a region so far."""

    writer: int = -1  # the latest instruction that wrote
    value: int | None = None  # whose value that was
    readers: list[int] = field(default_factory=list)  # since then
    reads: dict[int, int] = field(default_factory=dict)  # of each view of a variable: its version
    version: int = 0


def _conflicts(
    program: Program, times: Sequence[Clock], uses: Sequence[Sequence[Access]]
) -> Iterator[Hazard]:
    """Find unordered accesses to one region, and reads of a wrong value."""
    known: dict[Region, _History] = {}
    for index, accesses in enumerate(uses):
        for access in sorted(accesses, key=lambda each: each.writes):
            history = known.setdefault(access.region, _History())
            earlier = [history.writer, *(history.readers if access.writes else ())]
            for i in dict.fromkeys(earlier):
                if i not in (-1, index) and not _over(program, times[index], i):
                    yield Hazard(i, index, access.region, "no event orders them")
            if access.writes:
                history.writer, history.value, history.readers = index, access.value, []
                history.version += 1
                continue
            history.readers.append(index)
            if access.value is None:
                continue
            seen = history.reads.setdefault(access.value, history.version)
            if history.value not in (None, access.value) or seen != history.version:
                yield Hazard(history.writer, index, access.region, "the value is overwritten")


def _overlaps(
    program: Program, times: Sequence[Clock], uses: Sequence[Sequence[Access]]
) -> Iterator[Hazard]:
    """Find blocks that may reuse memory while instructions of an earlier block still use it."""
    if program.blocks is None:
        return
    last: dict[int, dict[StreamName, int]] = {}  # of each block: the latest use on each stream
    for index, accesses in enumerate(uses[:-1]):
        stream = program.instructions[index].stream
        for access in accesses:
            if isinstance(access.region, tuple) and access.region[0] == "block":
                last.setdefault(access.region[1], {})[stream] = index
    for later, block in enumerate(program.blocks):
        for earlier, each in enumerate(program.blocks):
            if each.last >= block.first or each.device != block.device or earlier not in last:
                continue
            for stream, use in last[earlier].items():
                if use > times[block.first][stream] and stream != _stream(program, block.first):
                    region = ("blocks", earlier, later)
                    yield Hazard(use, block.first, region, "nothing says that the first is free")
                elif use > block.first:
                    yield Hazard(block.first, use, ("block", earlier), "it is used after its end")


def _over(program: Program, clock: Clock, index: int) -> bool:
    return clock[_stream(program, index)] >= index


def _stream(program: Program, index: int) -> StreamName:
    return program.instructions[index].stream
