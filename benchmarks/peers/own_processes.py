"""Shared by the scripts of peers with their own processes: each rank gets its rank and size."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from measure.cases import Array, Case, add_arguments, selected
from measure.contest import Contestant, Timing, dump, hold

from peers import PEERS


class Side(Protocol):
    """A peer whose ranks have met."""

    about: str  # the library's name and version

    def contestant(self, case: Case) -> Contestant:
        """Make the peer's contestant; a collective call."""

    def slowest(self, seconds: Array) -> Array:
        """Return the element-wise maximum of the ranks' arrays; a collective call."""


def run(name: str, connect: Callable[[int, list[int]], Side]) -> None:
    """Time a peer as one of its ranks; rank 0 writes the timings.

    Args:
        name: The peer's, in `PEERS`.
        connect: Meets the other ranks; gets this one's number and a free port per rank.
    """
    parser = argparse.ArgumentParser(description=f"Time {PEERS[name].title} as one of its ranks.")
    add_arguments(parser)
    parser.add_argument("--timings", type=Path, required=True, help="where rank 0 writes them")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ports", type=int, nargs="+", required=True, help="one per rank")
    options = parser.parse_args()
    side = connect(options.rank, options.ports)
    timings: list[Timing] = []
    for case in selected(options, len(options.ports)):
        timings += hold([side.contestant(case)], options.rank, options.seconds, side.slowest)
    if options.rank == 0:
        dump(timings, side.about, options.timings)
