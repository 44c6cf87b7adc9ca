"""What a plan is: what one member would do in a call, for people to read and for tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Where a call is planned.

    Args:
        transport: What carries it.
        rank: The member that it is planned for.
        size: How many members there are.
    """

    transport: str
    rank: int
    size: int


@dataclass(frozen=True)
class Placed:
    """Where a call's arrays lie.

    Args:
        symmetric: In symmetric memory, as far as the call's direct way needs that.
        in_place: The member's own part of the output is that of the input.
    """

    symmetric: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Plan:
    """What one member does in a call. Bytes that only others know of are None.

    Args:
        call: The call, as its caller writes it.
        transport: What carries it.
        algorithm: The way it takes.
        chunk: Bytes that one step moves at most; 0 where all goes at once.
        stores: How staged chunks are written: "ordinary", or "streaming", past the caches.
        steps: What this member does, in words; steps of different chunks overlap.
        read: Bytes that it loads, from arrays, staging memory and other members' memory.
        written: Bytes that it stores there.
        sent: Bytes of data that it sends through sockets.
        staging: Bytes of staging memory that it uses for this at most.
        parts: Plans of the calls that this one is made of, in their order.
    """

    call: str
    transport: str
    algorithm: str
    steps: tuple[str, ...]
    chunk: int = 0
    stores: str = "ordinary"
    read: int | None = None
    written: int | None = None
    sent: int | None = None
    staging: int | None = None
    parts: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        how = f"{self.algorithm} through {self.transport}"
        if self.chunk:
            how += f", at most {in_units(self.chunk)} at a time"
        if self.stores != "ordinary":
            how += f", {self.stores} stores"
        lines = [f"{self.call}: {how}"]
        lines += [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        figures = {
            "reads": self.read,
            "writes": self.written,
            "sends": self.sent,
            "staging memory": self.staging,
        }
        known = {name: in_units(value) for name, value in figures.items() if value is not None}
        if known:
            told = ", ".join(f"{name} {amount}" for name, amount in known.items())
            lines.append(f"  this rank: {told}")
        for part, alike in itertools.groupby(self.parts):
            number = len(list(alike))
            times = f"{number} times " if number > 1 else ""
            lines += [f"  {line}" for line in f"{times}{part}".splitlines()]
        return "\n".join(lines)


def in_units(nbytes: int) -> str:
    """Write a number of bytes for people: "512 KiB", "1.5 MiB", "12 bytes"."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} byte{'' if nbytes == 1 else 's'}"
