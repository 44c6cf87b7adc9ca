"""Fuse a chain of element-wise operations with the operator before or after it, piece by piece.

An epilogue: a product or a convolution computes some rows, and the chain (its bias, its activation)
works on them while they are in the cache. A reduction: the chain's result is summed piece by piece,
and is never stored as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.graph.core.op_table import Attrs, lookup, register
from allreduce.graph.ops.common import same_spec
from allreduce.graph.ops.fusion import Chain, part

# Bytes of a piece. BLAS reads the other factor anew for each, so it must not be small. Against two
# operations, on one busy core: 13.1 ms instead of 14.0 for relu(a @ w + b) with (65536, 64) and
# (64, 64); 4.0 instead of 4.5 for the mean of (x - y)² of (4096, 1024), where pieces of 64 KiB take
# longer than two operations; no difference for a convolution and its relu: BLAS takes most of it.
_PIECE_BYTES = 1 << 20
SUMS = ("sum", "mean", "sum_to")


@dataclass(frozen=True, slots=True)
class Epilogue:
    """A product, and the chain that follows it.

    Attributes:
        op: The product: a row of the operator table with `by_rows`.
        reads: How many of the inputs are its own: the first ones.
        chain: Its inputs are the product's value and, behind it, the rest.
    """

    op: str
    attrs: Mapping[str, Any]
    reads: int
    dtype: np.dtype[Any]
    chain: Chain

    def __str__(self) -> str:
        return f"{self.op}+{self.chain}"

    def run(self, out: np.ndarray, inputs: Sequence[np.ndarray]) -> None:
        """Write the chain's value into `out`, some rows at a time."""
        kernel, own, rest = lookup(self.op).cpu, inputs[: self.reads], inputs[self.reads :]
        assert kernel is not None, self.op
        over = self.is_in_place(out)
        for rows in _pieces(len(out), out.nbytes, _PIECE_BYTES):
            here = out[rows]
            product = here if over else np.empty(here.shape, self.dtype)
            kernel(product, [own[0][rows], *own[1:]], self.attrs)
            self.chain.run(here, [product, *(part(x, out.ndim, rows) for x in rest)])

    def is_in_place(self, out: np.ndarray) -> bool:
        """Return whether the last operation may write over the product."""
        last = self.chain.links[-1]
        return self.dtype == out.dtype and (0 not in last.reads or lookup(last.op).in_place)

    def rows_of_piece(self, out: np.ndarray) -> int:
        """Return how many rows are made at a time; the last ones may be fewer."""
        first = next(_pieces(len(out), out.nbytes, _PIECE_BYTES))
        return int(first.stop)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A chain, and the sum or mean of its value.

    Attributes:
        op: One of SUMS.
        axes: Those of the chain's value that it goes along.
        dtype: Of the chain's value.
    """

    chain: Chain
    op: str
    attrs: Mapping[str, Any]
    axes: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.chain}+{self.op}"

    def run(self, out: np.ndarray, inputs: Sequence[np.ndarray]) -> None:
        """Write the sum of the chain's values into `out`."""
        shape = np.broadcast_shapes(*(x.shape for x in inputs))
        if 0 in self.axes:
            self._add_up(out, shape, inputs)
            return
        kernel = lookup(self.op).cpu
        assert kernel is not None, self.op
        for rows, value in self._values(shape, inputs):
            kernel(out[rows], [value], self.attrs)

    def _values(
        self, shape: tuple[int, ...], inputs: Sequence[np.ndarray]
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the chain's value, some rows at a time, in memory that is used again."""
        buffer: np.ndarray | None = None
        size = int(np.prod(shape)) * self.dtype.itemsize
        for rows in _pieces(shape[0], size, _PIECE_BYTES):
            count = min(rows.stop, shape[0]) - rows.start
            if buffer is None:
                buffer = np.empty((count, *shape[1:]), self.dtype)
            value = buffer[:count]
            self.chain.run(value, [part(x, len(shape), rows) for x in inputs])
            yield rows, value

    def _add_up(
        self, out: np.ndarray, shape: tuple[int, ...], inputs: Sequence[np.ndarray]
    ) -> None:
        add = lookup("sum" if self.op == "mean" else self.op).cpu
        assert add is not None, self.op
        if not shape[0]:
            out.fill(0)
        for rows, value in self._values(shape, inputs):
            target = np.empty_like(out) if rows.start else out
            add(target, [value], self.attrs)
            if rows.start:
                np.add(out, target, out=out)
        if self.op == "mean":
            count = np.prod([shape[axis] for axis in self.axes])
            np.divide(out, out.dtype.type(count), out=out)


def _pieces(rows: int, nbytes: int, size: int) -> Iterator[slice]:
    """Cut `rows` that take `nbytes` together into pieces of about `size` bytes."""
    each = max(1, size * rows // max(1, nbytes)) if nbytes > size else max(1, rows)
    return (slice(first, first + each) for first in range(0, rows, each))


def _run(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    attrs["chain"].run(out, inputs)


# Made by a pass, which knows the spec.
register("fused_product", same_spec, _run)
register("fused_sum", same_spec, _run)
