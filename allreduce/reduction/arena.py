"""The arena: an optimizer's parameters, gradients and slots, each contiguous, in one order.

A bucket is then a range, an update one kernel call over it, and a gradient is written where it is
reduced.
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
    """Where one parameter lies: `size` elements from element `start` on."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies, in elements of `dtype`; the same for parameters, gradients and slots.

    The first `header` elements are no parameter's: among the gradients the very first of them is
    the number of samples, so that it is summed over the replicas with the first bucket. So are the
    others, which whoever reduces may use.
    """

    dtype: np.dtype[Any]
    spans: tuple[Span, ...]
    header: int
    size: int


def lay_out(parameters: Iterable[tuple[str, tuple[int, ...]]], dtype: Any) -> Layout:
    """Give each parameter (name, shape) its place, in the given order, 64-byte aligned."""
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
    """A layout in memory, for one replica.

    Args:
        layout: Where everything lies.
        slots: The optimizer's per-parameter state: "m", "v".
        allocate: Makes a zeroed, aligned, private array of `size` elements of `dtype`.
        allocate_gradients: The same, in memory that collectives need not copy where there is such.
    """

    def __init__(
        self,
        layout: Layout,
        slots: Sequence[str],
        allocate: Callable[[int, np.dtype[Any]], np.ndarray],
        allocate_gradients: Callable[[int, np.dtype[Any]], np.ndarray],
    ) -> None:
        self.layout = layout
        self.parameters = allocate(layout.size, layout.dtype)
        self.gradients = allocate_gradients(layout.size, layout.dtype)
        self.slots = {name: allocate(layout.size, layout.dtype) for name in slots}
        self.sums: dict[int, np.ndarray] = {}  # of own slices that lie by themselves, by bucket
        self.iterations = 0
        self.number = 0  # of the update that is under way, from 1
        self.loaded: dict[str, np.ndarray] = {}  # slots that are set by the next step

    @property
    def count(self) -> np.ndarray:
        """The number of samples behind the gradients, as an array of one element."""
        return self.gradients[:1]

    def view(self, kind: np.ndarray, index: int) -> np.ndarray:
        """Return parameter `index`'s part of one of the arrays, in its shape, sharing memory."""
        span = self.layout.spans[index]
        return kind[span.start : span.start + span.size].reshape(span.shape)
