"""Timings of steps, of their collectives and of their batches, all in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


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


class StepTiming(NamedTuple):
    """The start and end of a step, and the times of its collectives, by node."""

    began: float
    ended: float
    clocks: Mapping[int, Clock]

    @property
    def seconds(self) -> float:
        """The step's duration."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """The seconds that a step's batch took to prepare, and that the step waited for it.

    The difference overlapped with other steps.
    """

    made: float
    waited: float
