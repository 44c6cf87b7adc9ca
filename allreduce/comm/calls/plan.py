"""Plans: the steps that one member takes in a call, for people and for tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The work of one member in a call. Byte counts that only other members know are None.

    Args:
        call: The call, as its caller writes it.
        chunk: Largest number of bytes that one step moves; 0 if one step moves all.
        stores: How staged chunks are written: "ordinary", or "streaming", past the caches.
        steps: A description of each step, if the transport plans them; steps of different chunks
            overlap.
        sent: Bytes of data sent through sockets.
        staging: Largest number of bytes of staging memory in use.
        parts: Plans of the calls that this one consists of, in order.
    """

    call: str
    transport: str
    algorithm: str
    steps: tuple[str, ...] = ()
    chunk: int = 0
    stores: str = "ordinary"
    sent: int | None = None
    staging: int | None = None
    parts: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        how = f"{self.algorithm} through {self.transport}"
        if self.chunk:
            how += f", at most {format_bytes(self.chunk)} at a time"
        if self.stores != "ordinary":
            how += f", {self.stores} stores"
        lines = [f"{self.call}: {how}"]
        lines += [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        figures = {"sends": self.sent, "staging memory": self.staging}
        known = {name: format_bytes(value) for name, value in figures.items() if value is not None}
        if known:
            amounts = ", ".join(f"{name} {amount}" for name, amount in known.items())
            lines.append(f"  this rank: {amounts}")
        for part, alike in itertools.groupby(self.parts):
            number = len(list(alike))
            times = f"{number} times " if number > 1 else ""
            lines += [f"  {line}" for line in f"{times}{part}".splitlines()]
        return "\n".join(lines)


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes: "512 KiB", "1.5 MiB", "12 bytes"."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} byte{'' if nbytes == 1 else 's'}"
