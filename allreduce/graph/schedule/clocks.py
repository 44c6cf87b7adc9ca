"""Vector clocks of a program: how much of each stream has ended when an instruction starts.

Instructions of one stream run in order; only events order different streams, even on one device.

Source: Mattern, Virtual Time and Global States of Distributed Systems (1989), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allreduce.graph.schedule.program import Instruction
from allreduce.graph.schedule.streams import StreamName

Clock = Mapping[StreamName, int]  # of each stream: its latest instruction that is over, or -1


def clocks(instructions: Sequence[Instruction]) -> list[Clock]:
    """Return each instruction's clock at its start, and last the clock of the step's end."""
    before: list[Clock] = []
    then: list[Clock] = []
    streams = dict.fromkeys(each.stream for each in instructions)
    latest: dict[StreamName, Clock] = {stream: dict.fromkeys(streams, -1) for stream in streams}
    for index, instruction in enumerate(instructions):
        clock = latest[instruction.stream]
        for i in instruction.waits:
            clock = {stream: max(clock[stream], then[i][stream]) for stream in streams}
        before.append(clock)
        then.append({**clock, instruction.stream: index})
        latest[instruction.stream] = then[-1]
    return [*before, dict.fromkeys(streams, len(instructions))]
