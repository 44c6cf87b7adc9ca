"""What callers may pass to collectives, and what the error says if it is something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm.base import Array
from allreduce.comm.call import CARRIES, DTYPES, OPERATORS, remedy
from allreduce.errors import ShapeError, UnsupportedError, UsageError, unknown_name

CUTS = ("reduce_scatter", "scatter")  # axis 0 of the input is cut into shares
JOINS = ("all_gather", "gather")  # axis 0 of the output is made of shares
_REDUCE = ("all_reduce", "reduce", "reduce_scatter")


@dataclass(frozen=True)
class Context:
    """Who is calling what, for checks and for messages."""

    collective: str
    member: str  # "[transport] rank 2"
    group: str
    rank: int
    size: int

    @property
    def where(self) -> str:
        return f"{self.member}: {self.collective}"


@dataclass(frozen=True)
class Options:
    """What a collective takes besides arrays.

    Args:
        op: The operator's name.
        root: The member that gives or gets.
        counts: Rows of every member's share; for all_to_all, that this member sends to each.
        receives: Rows that this member gets from each; all_to_all with counts only.
        scale: Factors before and after the reduction.
    """

    op: str | None = None
    root: int | None = None
    counts: Sequence[int] | None = None
    receives: Sequence[int] | None = None
    scale: tuple[float, float] = (1.0, 1.0)


def check_op(context: Context, op: str | None, dtype: np.dtype[Any]) -> None:
    """Check that the operator exists, and makes sense on the type."""
    name = str(dtype)
    if (op is not None or context.collective in _REDUCE) and op not in OPERATORS[1:]:
        raise unknown_name("operator", op, OPERATORS[1:])
    suffix = f" with operator {op}" if op else ""
    if name not in DTYPES[1:]:
        raise UnsupportedError(
            f"{context.where}{suffix} does not carry {name}: "
            f"there are {', '.join(DTYPES[1:])}; convert with astype"
        )
    if op is not None and name not in CARRIES[op]:
        raise UnsupportedError(f"{context.where}{suffix} does not carry {name}: {remedy(op, name)}")


def is_whole(number: Any) -> bool:
    """Say whether it is a whole number, of Python or NumPy."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def check_root(context: Context, root: Any) -> int:
    """Return the root as a plain integer."""
    if not is_whole(root) or not 0 <= root < context.size:
        raise UsageError(
            f"{context.where} got root={root!r}; expected a rank from 0 to {context.size - 1}"
        )
    return int(root)  # a NumPy integer of 8 bits could not be packed


def check_counts(context: Context, counts: Sequence[int], rows: int | None) -> None:
    """Check rows per member; `rows` is how many there are to be cut."""
    if (
        not isinstance(counts, Sequence | np.ndarray)
        or len(counts) != context.size
        or not all(isinstance(count, int | np.integer) and count >= 0 for count in counts)
    ):
        raise UsageError(
            f"{context.where} takes counts of {context.size} members' rows, but got {counts!r}"
        )
    if rows is not None and sum(counts) != rows:
        raise ShapeError(
            f"{context.where} got counts {list(counts)}, {sum(counts)} rows in all, for an array "
            f"of {rows} rows"
        )


def check_out(context: Context, out: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return the output array, if the result fits it."""
    if out.shape != shape or out.dtype != dtype:
        raise ShapeError(
            f"{context.where}: out must have shape {shape} and dtype {dtype}, but has "
            f"{out.shape} and {out.dtype}"
        )
    if not out.flags.writeable:
        raise UsageError(f"{context.where}: out is read-only")
    return out


def check_overlap(context: Context, x: Array, out: Array, options: Options) -> None:
    """Allow the same memory, or the own share of the longer array; refuse other overlaps."""
    if x.size == 0 or out.size == 0 or not np.may_share_memory(x, out):
        return
    name = context.collective
    longer, shorter = (out, x) if name in JOINS else (x, out)
    if name in (*JOINS, "scatter") and longer.ndim:
        counts = options.counts
        rows = len(shorter) if shorter.ndim else 1
        first = context.rank * rows if counts is None else sum(counts[: context.rank])
        longer = longer[first:]
    if name in ("reduce_scatter", "all_to_all") or longer.ctypes.data != shorter.ctypes.data:
        raise UsageError(
            f"{context.where}: out overlaps the input without being the same memory; "
            "pass another array, or a copy"
        )
