"""Memory for the arrays of an arena: a replica's own, or that of all members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.devices import Buffer, Device
from allreduce.graph.spec import show
from allreduce.reduction import Layout


def contents_of(layout: Layout) -> list[tuple[int, str]]:
    """Say for errors what lies in one of an arena's arrays."""
    return [
        (
            span.size * layout.dtype.itemsize,
            f"{layout.dtype}{show(span.shape)} of {span.name!r}, its value, gradient or slot",
        )
        for span in layout.spans
    ]


def private(
    device: Device, size: int, dtype: np.dtype[Any], *, contents: Sequence[tuple[int, str]]
) -> np.ndarray:
    """Make zeros in a device's memory."""
    array: np.ndarray = device.allocate(size * dtype.itemsize, contents).array(dtype, (size,))
    return array


def symmetric(
    device: Device,
    communicator: Communicator,
    size: int,
    dtype: np.dtype[Any],
    *,
    contents: Sequence[tuple[int, str]],
) -> np.ndarray:
    """Make zeros in a communicator's memory, and count it as its device's."""
    taken = device.memory.take(size * dtype.itemsize, contents)
    try:
        made: np.ndarray = communicator.empty((size,), dtype)
    except BaseException:
        device.memory.give_back(taken)
        raise
    shared = Buffer.of(made, device, symmetric=True)
    while isinstance(made.base, np.ndarray):  # what all views of it keep
        made = made.base
    device.memory.until_gone(taken, made)
    array: np.ndarray = shared.array(dtype, (size,))
    array[...] = 0
    return array
