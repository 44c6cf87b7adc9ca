"""Who runs a program, and what one step is told."""

from __future__ import annotations

from dataclasses import dataclass

from allreduce.comm import Communicator


@dataclass(frozen=True, slots=True)
class Replica:
    """Who runs: `index` among this process's replicas, `id` among all."""

    index: int
    id: int
    communicator: Communicator | None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """What a step is told.

    Attributes:
        rows: This replica's samples.
        row_offset: Where they begin in the global batch.
        step: The step's number, from 1.
        everyone: The samples of every replica; None where these are not known.
    """

    rows: int
    row_offset: int
    step: int
    everyone: tuple[int, ...] | None = None
