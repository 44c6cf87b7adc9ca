"""Time contestants: alternately, on rewritten inputs; the slowest rank counts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from measure.cases import Array, Case

WARM_UP, FEWEST, MOST = 5, 10, 4000  # runs
EMPTY, ORDINARY = "comm.empty", "ordinary"  # ours
# The machine's limits: of arrays that all map, and of private ones.
PROBE, PRIVATE_PROBE = "probe", "probe, private"


@dataclass(frozen=True)
class Contestant:
    """One way to carry out a case.

    Args:
        name: The contestant's name.
        case: The case.
        refill: Rewrites a rank's input.
        barrier: The contestant's own barrier.
        call: The timed call.
        result: Returns the output of the last call, as a NumPy array.
    """

    name: str
    case: Case
    refill: Callable[[Array], Any]
    barrier: Callable[[], Any]
    call: Callable[[], Any]
    result: Callable[[], Array]

    def run(self, source: Array) -> float:
        """Do one run; returns its seconds on this rank."""
        self.refill(source)
        self.barrier()
        start = time.perf_counter()
        self.call()
        return time.perf_counter() - start


@dataclass(frozen=True)
class Timing:
    """The times of one contestant in one case."""

    collective: str
    dtype: str
    ranks: int
    nbytes: int
    contestant: str
    runs: int
    median: float  # seconds
    p99: float  # seconds

    @property
    def place(self) -> tuple[str, int, int]:
        """The settings that contestants share."""
        return self.collective, self.ranks, self.nbytes


def hold(
    contestants: Sequence[Contestant],
    rank: int,
    seconds: float,
    slowest: Callable[[Array], Array],
) -> list[Timing]:
    """Time all contestants of one size alternately, and check their results.

    Args:
        contestants: Their cases differ in the type of elements at most.
        rank: This process's.
        seconds: How long to go on, roughly.
        slowest: Returns the element-wise maximum of the ranks' arrays of seconds; a collective.

    Raises:
        AssertionError: A contestant computed something wrong.
    """
    sources = {each.case: each.case.source(rank) for each in contestants}
    start = time.perf_counter()
    _rounds(contestants, sources, WARM_UP)
    lap = float(slowest(np.array([(time.perf_counter() - start) / WARM_UP]))[0])
    runs = int(min(MOST, max(FEWEST, seconds / lap)))
    times = _rounds(contestants, sources, runs)
    for each in contestants:
        _spoil(each.result())
        each.run(sources[each.case])
        np.testing.assert_array_equal(each.result(), each.case.expected(rank), each.name)
    return [
        _timing(each, column)
        for each, column in zip(contestants, slowest(times).T.tolist(), strict=True)
    ]


def _rounds(contestants: Sequence[Contestant], sources: Mapping[Case, Array], runs: int) -> Array:
    """Let all run so often; returns their seconds, `(runs, contestants)`."""
    times = np.empty((runs, len(contestants)))
    for number, row in enumerate(times):
        for index in balanced_order(len(contestants), number):
            row[index] = contestants[index].run(sources[contestants[index].case])
    return times


def balanced_order(count: int, number: int) -> list[int]:
    """Return the order of contestants in a round.

    In 2·count rounds each contestant follows every other one equally often. Otherwise it would
    always find the caches and the other ranks in the state that the same contestant leaves. (E. J.
    Williams, "Experimental Designs Balanced for the Estimation of Residual Effects of Treatments",
    1949.)
    """
    order = [(-(at // 2) if at % 2 == 0 else at // 2 + 1) % count for at in range(count)]
    order = [(index + number) % count for index in order]
    return order[::-1] if number // count % 2 else order


def _spoil(output: Array) -> None:
    """Overwrite an output, which then shows whether the next run writes all of it."""
    if output.flags.writeable:  # others give a new array each time
        output.fill(-1)


def _timing(contestant: Contestant, seconds: list[float]) -> Timing:
    case = contestant.case
    place = (case.collective, case.dtype, case.ranks, case.nbytes)
    return Timing(*place, contestant.name, len(seconds), statistics.median(seconds), p99(seconds))


def p99(seconds: Sequence[float]) -> float:
    """Return the 99th percentile; of fewer than 100 runs the longest."""
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))]


def dump(timings: Sequence[Timing], about: str, path: Path) -> None:
    """Write timings for the process that started this one.

    Args:
        timings: All timings of the run.
        about: The library's own description.
        path: The file.
    """
    rows = [asdict(timing) for timing in timings]
    path.write_text(json.dumps({"about": about, "timings": rows}))


def load(path: Path) -> tuple[list[Timing], str]:
    """Read the file of `dump`: the timings, and the library's description."""
    read = json.loads(path.read_text())
    return [Timing(**row) for row in read["timings"]], str(read["about"])
