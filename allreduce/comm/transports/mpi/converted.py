"""Reduce types that MPI does not reduce, by converting them piece by piece; plans say so.

A piece is converted, reduced and converted back before the next one begins, so the additional
memory does not grow with the arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm.calls.call import REDUCING, Array, Call
from allreduce.comm.calls.plan import Plan, format_bytes
from allreduce.comm.transports.mpi.types import Range, cut, wire_dtype
from allreduce.errors import OutOfMemoryError

_PIECE_BYTES = 8 << 20  # of a piece as MPI reduces it: one copy on each rank


@dataclass(frozen=True)
class Part:
    """Elements that are reduced at once.

    Args:
        begin: The first one's place in the input.
        place: The first one's place in the output, where they go there.
        root: The member that gets the sums; None if all members do, or each its share.
        shares: The number of elements that each member gets, if they are scattered.
    """

    begin: int
    count: int
    place: int
    root: int | None = None
    shares: tuple[int, ...] | None = None


def wire_of(call: Call) -> str | None:
    """Return the type as which MPI reduces a call's elements, if they have to be converted."""
    if call.collective not in REDUCING:
        return None
    assert call.op is not None, "a reduction has an operator"
    wire = wire_dtype(call.op, call.dtype)
    return wire if wire != call.dtype or call.op.startswith("logical") else None


def parts(call: Call, wire: str, size: int) -> Iterator[Part]:
    """Yield the parts to reduce, in the same order on all members."""
    most = _PIECE_BYTES // np.dtype(wire).itemsize
    if call.collective != "reduce_scatter":
        for begin, count in _pieces(0, call.count, most):
            yield Part(begin, count, begin, call.root)
        return
    shares = call.shares(size)
    if 0 < sum(shares) <= most:
        yield Part(0, sum(shares), 0, shares=shares)
        return
    for root, (first, length) in enumerate(cut(shares)):
        for begin, count in _pieces(first, length, most):
            yield Part(begin, count, begin - first, root)


def _pieces(begin: int, count: int, most: int) -> Iterator[Range]:
    """Cut a range into pieces of at most so many elements: (first element, elements)."""
    for first in range(begin, begin + count, most):
        yield first, min(most, begin + count - first)


class Piece:
    """A started part: converted, reduced, and converted back.

    Args:
        wire: The type that MPI reduces.
        element: MPI's name of that type.
    """

    def __init__(self, part: Part, call: Call, wire: str, element: Any) -> None:
        self._part, self._call, self._wire, self._element = part, call, wire, element

    def start(self, x: Array, comm: Any, mpi: Any, op: Any) -> Any:
        """Convert elements of the input, and start reducing them; returns MPI's request.

        Raises:
            OutOfMemoryError: There is no memory for the piece.
        """
        part, rank = self._part, comm.Get_rank()
        self._mine = part.root in (None, rank)
        source = x[part.begin : part.begin + part.count]
        logical = str(self._call.op).startswith("logical")
        with _explaining_memory(self._call, part.count * np.dtype(self._wire).itemsize, self._wire):
            self._buffer = (source != 0 if logical else source).astype(self._wire)
            if part.shares is not None:
                return self._scatter(part.shares, comm, rank, op)
        data = self._described(self._buffer)
        if part.root is None:
            return comm.Iallreduce(mpi.IN_PLACE, data, op)
        if self._mine:
            return comm.Ireduce(mpi.IN_PLACE, data, op, root=part.root)
        return comm.Ireduce(data, None, op, root=part.root)

    def _scatter(self, shares: Sequence[int], comm: Any, rank: int, op: Any) -> Any:
        self._source, self._buffer = self._buffer, np.empty(shares[rank], self._wire)
        source, target = self._described(self._source), self._described(self._buffer)
        return comm.Ireduce_scatter(source, target, list(shares), op)

    def _described(self, array: Array) -> list[Any]:
        return [array.view(np.uint8), len(array), self._element]

    @property
    def sums(self) -> Array | None:
        """The reduced elements, still of MPI's type; None if another member gets them."""
        return self._buffer if self._mine else None

    def finish(self, out: Array) -> None:
        """Put the results where they go in the output."""
        out[self._part.place : self._part.place + len(self._buffer)] = self._buffer


@contextlib.contextmanager
def _explaining_memory(call: Call, nbytes: int, wire: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(
            f"{call}: no memory for {format_bytes(nbytes)}, in which {call.dtype} is reduced as "
            f"{wire}; free some on this rank's host, or run fewer ranks there"
        ) from error


def plan_mpi(call: Call, size: int) -> Plan:
    """Say that MPI chooses the algorithm, and which types are converted."""
    agree = "reduce the call's signature over all members, to find out whether they agree"
    steps = ("MPI decides how; its own variables (MPIR_CVAR_…, OMPI_MCA_coll_…) say what",)
    if call.collective in ("send", "recv"):
        return Plan(str(call), "mpi", "mpi", steps)
    wire = wire_of(call)
    found = [] if wire is None else list(parts(call, wire, size))
    if not found:
        return Plan(str(call), "mpi", "mpi", (agree, *steps))
    sizes = [part.count * np.dtype(wire).itemsize for part in found]
    chunk = max(sizes) if len(found) > 1 else 0
    number = f"in {len(found)} pieces, one after the other" if chunk else "in one piece"
    convert = (
        f"convert {call.dtype} to {wire}, which MPI reduces, {number}: {format_bytes(sum(sizes))} "
        f"in all, with {format_bytes(max(sizes))} of memory; and the results back"
    )
    shown = (agree, convert, *steps)
    return Plan(str(call), "mpi", "mpi", shown, chunk=chunk, staging=max(sizes))
