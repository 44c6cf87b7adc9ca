"""Translate a collective call to MPI: type, counts, and number of requests.

Types that MPI lacks are converted (converted.py): float16 and bfloat16 to float32, in which they
are also summed, booleans to bytes of 0 and 1. A library before MPI-4 counts in 32 bits, and more
elements are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allreduce.comm.arguments import scaling
from allreduce.comm.calls.call import REDUCING, WHOLE, Array, Call
from allreduce.comm.transports.mpi.converted import Piece, parts, wire_of
from allreduce.comm.transports.mpi.types import (
    MOVED,
    OPERATORS,
    TYPES,
    Library,
    address,
    cut,
    wire_dtype,
)
from allreduce.errors import UnsupportedError


@dataclass
class Collective:
    """One member's arrays of one call, and the requests that carry them.

    Args:
        comm: The mpi4py communicator that only collectives of data use.
        x: The input, contiguous.
        out: The output, contiguous.
        where: "[mpi] rank 2", for messages.

    Raises:
        UnsupportedError: MPI cannot count the elements.
    """

    library: Library
    comm: Any
    call: Call
    x: Array | None
    out: Array | None
    where: str
    _requests: list[Any] = field(default_factory=list)
    _piece: Piece | None = None  # the one on its way, of what is converted,
    _ahead: deque[Piece] = field(default_factory=deque)  # and those behind it

    def __post_init__(self) -> None:
        call, mpi = self.call, self.library.mpi
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self._x = None if self.x is None else self.x.reshape(-1)
        self._out = None if self.out is None else self.out.reshape(-1)
        array = self._x if self._out is None else self._out
        if call.collective in REDUCING:
            self._prepare_reduction(mpi)
        elif array is not None:
            self._type = getattr(mpi, MOVED[array.dtype.itemsize])
        if array is not None and not self._ahead:
            self._check_countable()

    def _prepare_reduction(self, mpi: Any) -> None:
        call = self.call
        assert call.op is not None
        wire = wire_dtype(call.op, call.dtype)
        self._type, self._op = getattr(mpi, TYPES[wire]), getattr(mpi, OPERATORS[call.op])
        if wire_of(call):
            self._ahead.extend(
                Piece(part, call, wire, self._type) for part in parts(call, wire, self.size)
            )

    def _check_countable(self) -> None:
        sent = (
            self.call.count if self.call.collective in WHOLE else sum(self.call.shares(self.size))
        )
        elements = max(sent, sum(self.call.receives or ()))
        if elements > self.library.most:
            raise UnsupportedError(
                f"{self.where}: {self.call.collective} of {elements} elements: this MPI library "
                f"counts up to {self.library.most}; pass the array in pieces, or use a library of "
                "MPI-4, such as MPICH 4"
            )

    def post(self) -> None:
        """Start moving: from now on the output is written."""
        if not self._next_piece():
            request = getattr(self, f"_{self.call.collective}")(self.call.shares(self.size))
            self._requests = [] if request is None else [request]

    @property
    def posted(self) -> bool:
        """Whether MPI has been asked for all of it; before, it must not be for other calls."""
        return not self._ahead

    def _next_piece(self) -> bool:
        """Begin the next converted piece; return whether there is one."""
        self._piece = self._ahead.popleft() if self._ahead else None
        if self._piece is None:
            return False
        assert self._x is not None
        self._requests = [self._piece.start(self._x, self.comm, self.library.mpi, self._op)]
        return True

    def complete(self) -> bool:
        """Return whether it is complete; then the result is in the output."""
        while self.library.mpi.Request.Testall(self._requests):
            self._finish()
            if self._next_piece():
                continue
            return True
        return False

    def _finish(self) -> None:
        """Make a mean of sums, and put those that were converted into the output."""
        sums = self._out if self._piece is None else self._piece.sums
        if self.call.op == "mean" and sums is not None:
            scaling.divide(sums, self.size)
        if self._piece is not None and sums is not None:
            assert self._out is not None, "sums have a place"
            self._piece.finish(self._out)

    # --- reducing: `shares` are elements per member; returns MPI's request ------------------------

    def _all_reduce(self, shares: Sequence[int]) -> Any:  # noqa: ARG002
        source, target = self._source(), self._spec(self._out, self.call.count)
        return self.comm.Iallreduce(source, target, self._op)

    def _reduce(self, shares: Sequence[int]) -> Any:  # noqa: ARG002
        is_root = self.rank == self.call.root
        source = self._source() if is_root else self._spec(self._x, self.call.count)
        target = self._spec(self._out, self.call.count) if is_root else None
        return self.comm.Ireduce(source, target, self._op, root=self.call.root)

    def _source(self) -> Any:
        """Describe the input of a reduction, which may be the output."""
        if address(self._x) == address(self._out):
            return self.library.mpi.IN_PLACE
        return self._spec(self._x, self.call.count)

    def _reduce_scatter(self, shares: Sequence[int]) -> Any:
        target = self._spec(self._out, shares[self.rank])
        if self.call.counts is None:
            source = self._spec(self._x, self.call.count)  # a block's, as mpi4py has it
            return self.comm.Ireduce_scatter_block(source, target, self._op)
        source = self._spec(self._x, sum(shares))
        return self.comm.Ireduce_scatter(source, target, list(shares), self._op)

    # --- moving ----------------------------------------------------------------------------------

    def _barrier(self, shares: Sequence[int]) -> None:
        """Do nothing: that all members have made the call is known."""

    _empty = _barrier

    def _broadcast(self, shares: Sequence[int]) -> Any:  # noqa: ARG002
        assert self._out is not None
        if self.rank == self.call.root and address(self._x) != address(self._out):
            np.copyto(self._out, self._x)  # type: ignore[arg-type]  # the root has an input
        return self.comm.Ibcast(self._spec(self._out, self.call.count), root=self.call.root)

    def _all_gather(self, shares: Sequence[int]) -> Any:
        source = self._own_or_place(shares, self._x, self._out)
        if self.call.counts is None:
            target = self._spec(self._out, self.call.count)
            return self.comm.Iallgather(source, target)
        return self.comm.Iallgatherv(source, self._parts(self._out, shares))

    def _gather(self, shares: Sequence[int]) -> Any:
        return self._rooted(shares, self._x, self._out)

    def _scatter(self, shares: Sequence[int]) -> Any:
        return self._rooted(shares, self._out, self._x)

    def _rooted(self, shares: Sequence[int], part: Array | None, whole: Array | None) -> Any:
        """Move every member's part into the root's whole, or out of it."""
        root, gathers = self.call.root, self.call.collective == "gather"
        is_root = self.rank == root
        equal = self.call.counts is None
        near: Any = self._own_or_place(shares, part, whole)
        far: Any = None
        if is_root:
            far = self._spec(whole, self.call.count) if equal else self._parts(whole, shares)
        name = ("Igather" if gathers else "Iscatter") + ("" if equal else "v")
        source, target = (near, far) if gathers else (far, near)
        return getattr(self.comm, name)(source, target, root)

    def _all_to_all(self, shares: Sequence[int]) -> Any:
        if address(self._x) == address(self._out):
            self._x = None if self._x is None else self._x.copy()
        receives = self.call.receives if self.call.receives is not None else shares
        if self.call.counts is None:
            source, target = (self._spec(one, self.call.count) for one in (self._x, self._out))
            return self.comm.Ialltoall(source, target)
        source, target = self._parts(self._x, shares), self._parts(self._out, receives)
        return self.comm.Ialltoallv(source, target)

    # --- shared code -----------------------------------------------------------------------------

    def _spec(self, array: Array | None, count: int) -> list[Any]:
        assert array is not None
        return [array.view(np.uint8), count, self._type]

    def _parts(self, array: Array | None, shares: Sequence[int]) -> list[Any]:
        assert array is not None
        offsets = [first for first, _ in cut(shares)]
        return [array.view(np.uint8), (list(shares), offsets), self._type]

    def _own_or_place(self, shares: Sequence[int], part: Array | None, whole: Array | None) -> Any:
        """Describe the own share, which may lie where it belongs in the `whole`."""
        assert part is not None
        if whole is not None and shares[self.rank]:
            first = sum(shares[: self.rank]) * whole.dtype.itemsize
            if address(part) == address(whole) + first:
                return self.library.mpi.IN_PLACE
        return self._spec(part, shares[self.rank])
