"""Who runs a program, and what one step is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from allreduce.comm import Communicator
from allreduce.graph.core.inter_op_pool import Run
from allreduce.graph.placement.device_map import Places
from allreduce.graph.trace.rank_digest import Fingerprint


class Releasable(Protocol):
    """What keeps memory between steps only to be quicker."""

    def release_frames(self) -> None:
        """Let go of that memory."""


@dataclass(frozen=True, slots=True)
class Replica:
    """Who runs.

    Attributes:
        index: Among this process's replicas.
        id: Among all.
        communicator: Its member of theirs; None where it runs alone.
        places: What the device names in its program mean.
        generation: Of the world that it is in.
        fingerprint: Of what its process brings to a step.
        runs: Its times through steps in which helpers may still be.
        releasable: What runs its programs; one of them runs at a time.
    """

    index: int
    id: int
    communicator: Communicator | None
    places: Places
    generation: int = 0
    fingerprint: Fingerprint = field(default_factory=Fingerprint, repr=False, compare=False)
    runs: list[Run] = field(default_factory=list, repr=False, compare=False)
    releasable: WeakSet[Releasable] = field(default_factory=WeakSet, repr=False, compare=False)


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
