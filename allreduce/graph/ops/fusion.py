"""Chains of element-wise operations, computed by native code tile by tile, in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.ops.common import same_spec


@dataclass(frozen=True, slots=True)
class Link:
    """One operation of a chain.

    Attributes:
        op: An element-wise row of the operator table.
        reads: Inputs of the chain by their number, and earlier links by -1 - theirs.
    """

    op: str
    reads: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """Operations in order, of which the last gives the value; all values have one shape."""

    links: tuple[Link, ...]
    native: _native.Chain = field(repr=False, compare=False)

    @classmethod
    def of(cls, links: Sequence[Link], inputs: Sequence[np.dtype[Any]]) -> Chain | None:
        """Return a chain; None if native code has no such operation, or takes no such inputs."""
        if not all(each.isnative for each in inputs):
            return None
        rows = [
            (link.op, list(link.reads), link.dtype.num, slot)
            for link, slot in zip(links, slots_of(links), strict=True)
        ]
        native = _native.chain(rows, [each.num for each in inputs])
        return None if native is None else cls(tuple(links), native)

    def __str__(self) -> str:
        return "+".join(link.op for link in self.links)

    def run(self, out: np.ndarray, inputs: Sequence[np.ndarray]) -> None:
        """Write the value into `out`; inputs broadcast to it."""
        if not self.native.run(out, list(inputs)):  # an array is not aligned
            self.native.run(out, [x.copy() for x in inputs])


def slots_of(links: Sequence[Link]) -> list[int]:
    """Return the index of the tile that holds each link's value; the last one's is its own.

    A value's tile is given to a later one of its dtype when nothing reads it any more.
    """
    last = {-1 - i: at for at, link in enumerate(links) for i in link.reads if i < 0}
    free: dict[np.dtype[Any], list[int]] = {}
    slots: list[int] = []
    for at, link in enumerate(links[:-1]):
        empty = free.setdefault(link.dtype, [])
        slots.append(empty.pop() if empty else max(slots, default=-1) + 1)
        for i in {-1 - i for i in link.reads if i < 0}:
            if last[i] == at:
                free[links[i].dtype].append(slots[i])
    return [*slots, max(slots, default=-1) + 1]


def _run(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    attrs["chain"].run(out, inputs)


register("fused", same_spec, _run)  # made by a pass, which knows the spec
