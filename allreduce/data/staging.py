"""Batches on their way to devices, beside the step that runs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from allreduce import events
from allreduce.devices import lookup
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.schedule.streams import TO_DEVICE


class Stager:
    """Copies what replicas are fed to their devices, where these cannot read the host's memory.

    Who makes the next batch, while a step computes, waits until it is there and then hands it over.
    A batch has memory of its own: no step waits for a copy, and none is made where a step reads.
    The copies are on the devices' own host-to-device streams, on which steps have theirs.

    Args:
        replicator: Whose replicas are fed.
    """

    def __init__(self, replicator: Replicator) -> None:
        self._devices = [lookup(name) for name in replicator.devices]
        self._streams = [
            None if device.reads_host else device.own(TO_DEVICE) for device in self._devices
        ]
        self._began: float | None = None  # when the first of the batch's copies was given

    @property
    def copies(self) -> bool:
        """Whether there is a device that cannot read the host's memory."""
        return any(stream is not None for stream in self._streams)

    def put(self, replica: int, rows: np.ndarray, *, own: bool) -> Any:
        """Bring rows to a replica's device; they are there after `finish`, of the same thread.

        Args:
            replica: Which, among this process's.
            rows: In the host's memory; unchanged until `finish`.
            own: Whether they are nobody else's, who may change them later.
        """
        device, stream = self._devices[replica], self._streams[replica]
        if stream is None:
            return rows if own else rows.copy()
        if self._began is None:
            self._began = time.perf_counter()
        there = device.allocate(rows.nbytes).array(rows.dtype, rows.shape)
        device.copy(there, rows, stream)
        stream.hold(rows, there)  # also where no batch comes of it, as another array has no room
        return there

    def finish(self) -> None:
        """Wait until all rows are where they were brought."""
        if self._began is None:
            return
        copied = [stream.hold() for stream in self._streams if stream is not None]
        for event in copied:
            event.synchronize()
        began, self._began = self._began, None
        if events.heard():
            seconds = time.perf_counter() - began
            for stream in self._streams:
                if stream is not None:
                    place = {"stream": stream.name, "device": stream.device.name.local}
                    events.report("bring a batch", began, seconds, place)
