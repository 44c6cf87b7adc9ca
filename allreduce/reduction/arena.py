"""The arena: an optimizer's parameters, gradients and slots as contiguous arrays of one layout.

A bucket is a range of the arena, an update is one kernel call over it, and gradients are computed
where they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class Span:
    """The place of one parameter: `size` elements from element `start`."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all parameters, in elements of `dtype`; equal for gradients and slots.

    The first `header` elements belong to no parameter. In the gradients, the first of them is the
    number of samples, which is summed over the replicas with the first bucket. The others are
    summed too, and are free for use.
    """

    dtype: np.dtype[Any]
    spans: tuple[Span, ...]
    header: int
    size: int


def lay_out(parameters: Iterable[tuple[str, tuple[int, ...]]], dtype: Any) -> Layout:
    """Place each parameter (name, shape) in the given order, 64-byte aligned."""
    dtype = np.dtype(dtype)
    step = ALIGNMENT // dtype.itemsize
    spans = []
    start = step
    for name, shape in parameters:
        size = prod(shape)
        spans.append(Span(name, shape, start, size))
        start += -(-size // step) * step
    return Layout(dtype, tuple(spans), step, start)


class Arena:
    """One replica's arrays of a layout.

    Args:
        slots: The names of the optimizer's per-parameter state: "m", "v".
        allocate: Returns a zeroed, aligned, private array of `size` elements of `dtype`.
        allocate_gradients: The same, in memory that collectives can map, if there is any.
        divisor: An array of one element; by default on the host.
    """

    def __init__(
        self,
        layout: Layout,
        slots: Sequence[str],
        allocate: Callable[[int, np.dtype[Any]], np.ndarray],
        allocate_gradients: Callable[[int, np.dtype[Any]], np.ndarray],
        divisor: np.ndarray | None = None,
    ) -> None:
        self.layout = layout
        self.parameters = allocate(layout.size, layout.dtype)
        self.gradients = allocate_gradients(layout.size, layout.dtype)
        self.slots = {name: allocate(layout.size, layout.dtype) for name in slots}
        self.sums: dict[int, np.ndarray] = {}  # of own slices that lie by themselves, by bucket
        # The count of samples, or more where gradients are clipped by their norm.
        self.divisor = np.ones(1, layout.dtype) if divisor is None else divisor
        self.iterations = 0
        self.number = 0  # of the update that is under way, from 1
        self.loaded: dict[str, np.ndarray] = {}  # slots that are set by the next step
        self.begins = True  # whether the step that runs is an update's first micro-batch
        self.completes = True  # whether it is the last one, after which parameters change
        self.digests = b""  # of the steps of the earlier micro-batches, which ranks compare

    @property
    def count(self) -> np.ndarray:
        """The number of samples behind the gradients, as an array of one element."""
        return self.gradients[:1]

    def view(self, kind: np.ndarray, index: int) -> np.ndarray:
        """Return parameter `index`'s part of an array, in its shape; shares memory."""
        span = self.layout.spans[index]
        return kind[span.start : span.start + span.size].reshape(span.shape)


class ArenaShare(Arena):
    """Another arena's parameters, slots and count of updates, with gradients of its own.

    Programs that run at the same time can so compute gradients of the same variables.
    """

    def __init__(self, whole: Arena) -> None:
        self._whole = whole
        self.layout, self.parameters, self.slots = whole.layout, whole.parameters, whole.slots
        self.gradients = np.zeros_like(whole.gradients)
        self.divisor = np.ones_like(whole.divisor)
        self.sums = {}
        self.number = 0
        self.loaded = whole.loaded

    @property
    def iterations(self) -> int:
        """The number of updates, by whichever program."""
        return self._whole.iterations

    @iterations.setter
    def iterations(self, value: int) -> None:
        self._whole.iterations = value
