"""How candidates are compared: one communicator for each, in turns, on all ranks alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm.choice.tuning import CUT, Cell
from allreduce.comm.communicator import Communicator

_PARTS = 4
_LEAST_ROUNDS = 3 * _PARTS
_MOST_ROUNDS = 300
_ITEM = 4  # float32


@dataclass
class _Runner:
    """A candidate's communicator and arrays."""

    comm: Communicator
    cell: Cell

    def __post_init__(self) -> None:
        count = self.cell.nbytes // _ITEM
        size = self.comm.size
        if self.cell.collective in CUT:  # tcp counts what one member has for another
            count = count * size if self.comm.transport == "tcp" else count // size * size
        make: Callable[[int], Any] = self.comm.empty if self.cell.symmetric else _ordinary
        self._x = make(count)
        self._out = self._outputs(make, count)
        self._out[...] = 0
        self._gives = self.cell.collective != "scatter" or self.comm.rank == 0

    def _outputs(self, make: Callable[[int], Any], count: int) -> Any:
        if self.cell.collective in ("all_gather", "gather"):
            return make(count * self.comm.size)
        one = self.cell.collective in ("reduce_scatter", "scatter")
        return make(count // self.comm.size if one else count)

    def run(self, value: float) -> float:
        """Rewrite the input and make the call; returns seconds."""
        call = getattr(self.comm, self.cell.collective)
        self._x[...] = value
        self.comm.barrier()
        start = time.perf_counter()
        call(self._x if self._gives else None, out=self._out)
        return time.perf_counter() - start


def _ordinary(count: int) -> Any:
    return np.empty(count, np.float32)


def compare(
    home: Communicator, comms: Sequence[Communicator], cell: Cell, seconds: float
) -> tuple[tuple[float, ...], ...]:
    """Time a cell's candidates; a collective call.

    Args:
        home: Over which the ranks agree when to end.
        comms: A communicator for each candidate, by its position.
        cell: What to compare.
        seconds: How long to do so, if that is enough for a few rounds.

    Returns:
        For each candidate the slowest rank's median seconds in each part of the rounds; every
        part has rounds from beginning to end.
    """
    runners = [_Runner(comm, cell) for comm in comms[: len(cell.candidates)]]
    for runner in runners:  # pages are touched, tables are made
        runner.run(0.0)
    times: list[list[float]] = [[] for _ in runners]
    end = time.perf_counter() + seconds
    for number in range(_MOST_ROUNDS):
        late = number >= _LEAST_ROUNDS and time.perf_counter() >= end
        if home.broadcast(np.array([late]))[0]:  # rank 0's clock counts
            break
        for turn in range(len(runners)):
            index = (turn + number) % len(runners)  # nobody always comes after the same
            times[index].append(runners[index].run(float(number)))
    return _slowest(home, times)


def _slowest(home: Communicator, times: Iterable[list[float]]) -> tuple[tuple[float, ...], ...]:
    medians = [[statistics.median(one[part::_PARTS]) for part in range(_PARTS)] for one in times]
    return tuple(tuple(row) for row in home.all_reduce(np.array(medians), op="max").tolist())
