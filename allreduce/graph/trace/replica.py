"""Describe a replica, and the rows and number of one step."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from allreduce.comm import Communicator
from allreduce.graph.placement.device_map import DeviceMap
from allreduce.graph.trace.rank_digest import RankDigest


class Releasable(Protocol):
    """An object that caches memory between steps and can free it."""

    def release_frames(self) -> None:
        """Free the cached memory."""


class ThreadedRun(Protocol):
    """A run of a program in which pool threads may be active."""

    def end(self) -> None:
        """Wait until none is; repeatable."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of the program.

    Attributes:
        index: Its index among this process's replicas.
        id: Its index among all replicas.
        communicator: Its member of the replicas' communicator; None for a single replica.
        places: Maps the device names of its program to devices.
        generation: The generation of its world.
        rank_digest: The digest of its process's batches and assigned values.
        runs: Runs of its programs in which pool threads may still be active.
        releasable: Its executors; one of them runs at a time.
        guard: The lock that each change of a variable takes, if several programs run at a time.
        updates_remotely: Whether a step leaves its gradients in the arena, and parameter servers
            update.
    """

    index: int
    id: int
    communicator: Communicator | None
    places: DeviceMap
    generation: int = 0
    rank_digest: RankDigest = field(default_factory=RankDigest, repr=False, compare=False)
    runs: list[ThreadedRun] = field(default_factory=list, repr=False, compare=False)
    releasable: WeakSet[Releasable] = field(default_factory=WeakSet, repr=False, compare=False)
    guard: threading.Lock | None = field(default=None, repr=False, compare=False)
    updates_remotely: bool = False


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The number of a step, and the rows of one replica in it.

    Attributes:
        rows: The number of this replica's samples.
        row_offset: The index of their first row in the global batch.
        step: The step's number, from 1.
        rows_per_replica: The number of samples of every replica of any rank; None if unknown.
    """

    rows: int
    row_offset: int
    step: int
    rows_per_replica: tuple[int, ...] | None = None
