"""Reductions of what MPI does not reduce, as another type, piece by piece.

A piece is converted, reduced and converted back before the next one is begun: what that takes of
memory does not grow with the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm import scaling
from allreduce.comm.array import Array
from allreduce.comm.mpi.types import Range

_PIECE_BYTES = 8 << 20  # of a piece as MPI reduces it: one copy on each rank


@dataclass(frozen=True)
class Conversion:
    """How one member's elements become others, and the results its own again.

    Args:
        x: What goes in, flat.
        out: Where the result goes, flat; None where none goes.
        truth: Whether elements count as true or false.
        wire: The type that MPI reduces.
        element: What MPI calls that.
        divisor: What results are divided by.
    """

    x: Array
    out: Array | None
    truth: bool
    wire: str
    element: Any
    divisor: int

    def cut(self, ranges: list[tuple[Range, int | None]]) -> Iterator[Piece]:
        """Yield the pieces, in an order that is the same on all members.

        Args:
            ranges: Of the input's elements, and who gets their sums; all members without a root.
        """
        most = _PIECE_BYTES // np.dtype(self.wire).itemsize
        for (begin, count), root in ranges:
            for offset in range(0, count, most):
                length = min(most, count - offset)
                place = offset if root is not None else begin + offset
                yield Piece(self, begin + offset, length, place, root)


class Piece:
    """Some elements on their way.

    Args:
        how: How they are converted.
        begin: The first one's place in the input.
        count: How many.
        place: The first one's place in the output, where they go there.
        root: Who gets them; None if all do.
    """

    def __init__(
        self, how: Conversion, begin: int, count: int, place: int, root: int | None
    ) -> None:
        self._how, self._begin, self._count = how, begin, count
        self._place, self._root = place, root

    def start(self, comm: Any, mpi: Any, op: Any) -> Any:
        """Convert, and start reducing; returns MPI's request."""
        source = self._how.x[self._begin : self._begin + self._count]
        self._buffer = (source != 0 if self._how.truth else source).astype(self._how.wire)
        data = [self._buffer.view(np.uint8), self._count, self._how.element]
        if self._root is None:
            return comm.Iallreduce(mpi.IN_PLACE, data, op)
        if self._root == comm.Get_rank():
            return comm.Ireduce(mpi.IN_PLACE, data, op, root=self._root)
        return comm.Ireduce(data, None, op, root=self._root)

    def finish(self, rank: int) -> None:
        """Put the results where they go."""
        if self._root not in (None, rank):
            return
        assert self._how.out is not None
        if self._how.divisor != 1:
            scaling.divide(self._buffer, self._how.divisor)
        self._how.out[self._place : self._place + self._count] = self._buffer
