"""Allocate an arena's arrays, in private memory or in memory that all members map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.devices import Buffer, Device, write
from allreduce.graph.core.spec import show
from allreduce.reduction import Arena, Bucket, Layout, slice_of


def contents_of(layout: Layout) -> list[tuple[int, str]]:
    """Describe the contents of one of an arena's arrays, for error messages."""
    return [
        (
            span.size * layout.dtype.itemsize,
            f"{layout.dtype}{show(span.shape)} of {span.name!r}, its value, gradient or slot",
        )
        for span in layout.spans
    ]


@dataclass(frozen=True, slots=True)
class ArenaAllocator:
    """Allocates one replica's arrays of an arena.

    Attributes:
        device: The device.
        communicator: The replica's communicator; None for a single replica.
        layout: The arena's layout.
    """

    device: Device
    communicator: Communicator | None
    layout: Layout

    def arena(self, slots: Sequence[str], maps_all: bool) -> Arena:
        """Make an arena; with several replicas, all of them map its gradients.

        Args:
            slots: The names of the optimizer's slots.
            maps_all: Whether the replicas also map parameters and slots.
        """
        shared = self.private if self.communicator is None else self.symmetric
        return Arena(self.layout, slots, shared if maps_all else self.private, shared)

    def sums(self, buckets: Sequence[Bucket]) -> dict[int, np.ndarray]:
        """Allocate the sums of this replica's slices, by bucket."""
        members = self.communicator
        assert members is not None, "one of several"
        own = [slice_of(each, self.layout, members.size, members.rank) for each in buckets]
        return {
            each.index: self.private(part.stop - part.start, self.layout.dtype)
            for each, part in zip(buckets, own, strict=True)
        }

    def moved(self, old: np.ndarray) -> np.ndarray:
        """Copy an array into memory that all members map."""
        new = self.symmetric(self.layout.size, self.layout.dtype)
        write(new, old)
        return new

    def private(self, size: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return zeros in the device's memory."""
        memory = self.device.allocate(size * dtype.itemsize, contents_of(self.layout))
        array: np.ndarray = memory.array(dtype, (size,))
        return array

    def symmetric(self, size: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return zeros in the communicator's memory, which is counted as the device's.

        A communicator has none on devices with memory of their own.
        """
        assert self.communicator is not None, "one of several"
        if not self.device.name.on_host:
            return self.private(size, dtype)
        taken = self.device.memory.take(size * dtype.itemsize, contents_of(self.layout))
        try:
            made: np.ndarray = self.communicator.empty((size,), dtype)
        except BaseException:
            self.device.memory.give_back(taken)
            raise
        shared = Buffer.of(made, self.device, symmetric=True)
        while isinstance(made.base, np.ndarray):  # the owner, which all views keep alive
            made = made.base
        self.device.memory.until_gone(taken, made)
        array: np.ndarray = shared.array(dtype, (size,))
        array[...] = 0
        return array
