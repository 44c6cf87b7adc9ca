"""Chains of element-wise operations, carried out block by block, in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.graph.core.op_table import Attrs, lookup, register
from allreduce.graph.ops.common import same_spec

# Bytes of a block of the result. With a handful of others like it, it stays in a level-2 cache; a
# step on it takes as long as some ten of the interpreter's own.
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Link:
    """One operation of a chain.

    Attributes:
        op: An element-wise row of the operator table.
        reads: Inputs of the chain by their number, and earlier links by -1 - theirs.
    """

    op: str
    attrs: Mapping[str, Any]
    reads: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """Operations in order, of which the last gives the value; all values have one shape.

    Attributes:
        scratch: For each but the last, the index of the reused block that holds its value.
        native: The native chain, if all operations have native kernels.
    """

    links: tuple[Link, ...]
    scratch: tuple[int, ...]
    native: _native.Chain | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, links: Sequence[Link], inputs: Sequence[np.dtype[Any]]) -> Chain:
        """Give a value's block to a later one of its dtype when nothing reads it any more."""
        last = {-1 - i: at for at, link in enumerate(links) for i in link.reads if i < 0}
        free: dict[np.dtype[Any], list[int]] = {}
        scratch: list[int] = []
        for at, link in enumerate(links[:-1]):
            empty = free.setdefault(link.dtype, [])
            scratch.append(empty.pop() if empty else max(scratch, default=-1) + 1)
            for i in {-1 - i for i in link.reads if i < 0}:
                if last[i] == at:
                    free[links[i].dtype].append(scratch[i])
        return cls(tuple(links), tuple(scratch), _compiled(links, scratch, inputs))

    def __str__(self) -> str:
        return "+".join(link.op for link in self.links)

    def run(self, out: np.ndarray, inputs: Sequence[np.ndarray]) -> None:
        """Write the value into `out`; inputs broadcast to it."""
        if self.native is not None and self.native.run(out, list(inputs)):
            return
        kernels = [lookup(link.op).cpu for link in self.links]
        made: dict[int, np.ndarray] = {}
        for block, parts in _blocks(out, inputs):
            if made and made[0].shape != block.shape:
                made = {}
            for slot, link in zip(self.scratch, self.links, strict=False):
                if slot not in made:
                    made[slot] = np.empty(block.shape, link.dtype)
            values = [*(made[slot] for slot in self.scratch), block]
            for link, kernel, value in zip(self.links, kernels, values, strict=True):
                assert kernel is not None, link
                given = [parts[i] if i >= 0 else values[-1 - i] for i in link.reads]
                kernel(value, given, link.attrs)


def _compiled(
    links: Sequence[Link], scratch: Sequence[int], inputs: Sequence[np.dtype[Any]]
) -> _native.Chain | None:
    """Return the native chain of these operations; None if one needs NumPy."""
    if not all(each.isnative for each in inputs):
        return None
    last = max(scratch, default=-1) + 1
    rows = [
        (link.op, list(link.reads), link.dtype.num, slot)
        for link, slot in zip(links, (*scratch, last), strict=True)
    ]
    return _native.chain(rows, [each.num for each in inputs])


def _blocks(
    out: np.ndarray, inputs: Sequence[np.ndarray]
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Cut the result along its first axis, and the inputs with it."""
    if out.nbytes <= BLOCK_BYTES or not out.ndim:
        yield out, list(inputs)
        return
    if all((x.shape == out.shape and x.flags.c_contiguous) or x.size == 1 for x in inputs):
        # Whatever the axes are, as one.
        out = out.reshape(-1)
        inputs = [x.reshape(-1) if x.shape != () and x.size != 1 else x.reshape(()) for x in inputs]
    rows = max(1, BLOCK_BYTES * len(out) // out.nbytes)
    for first in range(0, len(out), rows):
        here = slice(first, first + rows)
        yield out[here], [_part(x, out.ndim, here) for x in inputs]


def _part(x: np.ndarray, ndim: int, rows: slice) -> np.ndarray:
    """Return the part of an input that broadcasts to some rows of the result."""
    return x[rows] if x.ndim == ndim and x.shape[0] != 1 else x


def _run(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    attrs["chain"].run(out, inputs)


register("fused", same_spec, _run)  # made by a pass, which knows the spec
