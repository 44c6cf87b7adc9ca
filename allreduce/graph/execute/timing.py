"""Timings of steps, of their collectives and of their batches, all in seconds."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from allreduce.devices import options


@dataclass(slots=True)
class Clock:
    """The times of one collective (`time.perf_counter()` seconds).

    Attributes:
        started: Its start.
        awaited: The start of the wait for it.
        over: The end of the wait; the collective may have completed earlier.
        early: Whether it was complete when the replica first waited for any collective after its
            start; None before that.
    """

    started: float
    awaited: float = 0.0
    over: float = 0.0
    early: bool | None = None

    @property
    def exposed(self) -> float:
        """The seconds that the replica waited."""
        return self.over - self.awaited


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The start and end of a step, and the times of its collectives, by node."""

    began: float
    ended: float
    clocks: Mapping[int, Clock]


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """The seconds that a step's batch took to prepare, and that the step waited for it.

    The difference overlapped with other steps.
    """

    made: float
    waited: float


class RecentSteps:
    """The durations of the latest steps, in seconds, and whether each used pipelining."""

    _KEPT = 64

    def __init__(self) -> None:
        self._steps = deque[tuple[bool, float]](maxlen=self._KEPT)

    def note(self, timing: StepTiming) -> StepTiming:
        """Record one step's duration; returns its timing."""
        self._steps.append((options.current().pipelining, timing.ended - timing.began))
        return timing

    def seconds(self, how: bool) -> list[float]:
        """Return the durations with pipelining (`how=True`) or without."""
        return [seconds for each, seconds in self._steps if each is how]

    def shares(self) -> list[float]:
        """Return the ratios of neighbouring steps, one with and one without pipelining."""
        return [
            one / other if how else other / one
            for (how, one), (next_how, other) in itertools.pairwise(self._steps)
            if how is not next_how
        ]
