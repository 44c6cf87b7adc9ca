"""Check the arguments of collectives."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from allreduce.comm.arguments.arrays import dtype_named
from allreduce.comm.calls.call import (
    CARRIES,
    COUNT_LIMIT,
    DTYPES,
    OPERATORS,
    REDUCING,
    remedy,
)
from allreduce.errors import (
    OutOfMemoryError,
    ShapeError,
    UnsupportedError,
    UsageError,
    unknown_name,
)

CUTS = ("reduce_scatter", "scatter")  # axis 0 of the input is cut into shares
JOINS = ("all_gather", "gather")  # axis 0 of the output is made of shares
UNSCALED: tuple[Any, Any] = (1.0, 1.0)
_BYTES_LIMIT = 1 << 62  # beyond any address, so that transports need not check it
_INT64_MOST = 2**63 - 1


def factors(prescale: Any, postscale: Any) -> tuple[Any, Any]:
    """Return `UNSCALED` if both factors are 1; other factors are checked later."""
    ones = all(type(factor) in (int, float) and factor == 1 for factor in (prescale, postscale))
    return UNSCALED if ones else (prescale, postscale)


class Context(NamedTuple):
    """The member and the collective, for checks and messages."""

    collective: str
    member: str  # "[transport] rank 2"
    group: str
    rank: int
    size: int
    item: str = ""  # of a list of arrays, which one

    @property
    def where(self) -> str:
        return f"{self.member}: {self.collective}{self.item and ': '}{self.item}"


@dataclass(frozen=True)
class Options:
    """The arguments of a collective besides arrays.

    Args:
        root: The member that gives or gets.
        counts: Rows of every member's share; for all_to_all, that this member sends to each.
        receives: Rows that this member gets from each; all_to_all with counts only.
        scale: Factors before and after the reduction.
        call_text: The caller's call, if it differs from this one (call_text.py).
    """

    op: str | None = None
    root: int | None = None
    counts: Sequence[int] | None = None
    receives: Sequence[int] | None = None
    scale: tuple[Any, Any] = UNSCALED
    call_text: str = ""


def check_op(context: Context, op: str | None, dtype: np.dtype[Any]) -> None:
    """Check that the operator exists, and makes sense on the type."""
    name = str(dtype)
    if (op is not None or context.collective in REDUCING) and op not in OPERATORS[1:]:
        raise unknown_name("operator", op, OPERATORS[1:], context.where)
    suffix = f" with operator {op}" if op else ""
    if name not in DTYPES[1:]:
        native = str(dtype.newbyteorder("="))
        if native in DTYPES[1:]:
            why = f"its bytes are in another order than this machine's; x.astype({native!r})"
        else:
            carried = [each for each in DTYPES[1:] if op is None or each in CARRIES[op]]
            why = f"there are {', '.join(carried)}; convert with astype"
        raise UnsupportedError(f"{context.where}{suffix} does not carry {name}: {why}")
    if op is not None and name not in CARRIES[op]:
        raise UnsupportedError(f"{context.where}{suffix} does not carry {name}: {remedy(op, name)}")


def is_whole(number: Any) -> bool:
    """Return whether it is a whole number, of Python or NumPy."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def check_root(context: Context, root: Any) -> int:
    """Return the root as a plain integer."""
    if not is_whole(root) or not 0 <= root < context.size:
        raise UsageError(
            f"{context.where} got root={root!r}; expected a rank from 0 to {context.size - 1}"
        )
    return int(root)  # a NumPy integer of 8 bits could not be packed


def check_counts(context: Context, counts: Any) -> tuple[int, ...]:
    """Return rows per member as plain integers: NumPy's narrow ones would wrap around in sums."""
    listed = counts.tolist() if isinstance(counts, np.ndarray) else counts
    if (
        not isinstance(listed, Sequence)
        or len(listed) != context.size
        or not all(is_whole(count) and 0 <= count < COUNT_LIMIT for count in listed)
    ):
        raise UsageError(
            f"{context.where} takes counts of {context.size} members' rows, each a whole number "
            f"from 0 to {COUNT_LIMIT - 1}, but got {reprlib.repr(counts)}"
        )
    return tuple(int(count) for count in listed)


def check_number(context: Context, x: Any, op: str | None) -> None:
    """Refuse a Python integer whose sum with others like it would wrap around unseen."""
    most = _INT64_MOST // context.size
    if type(x) is int and op == "sum" and abs(x) > most:
        raise UsageError(
            f"{context.where} sums Python integers in 64 bits, which {context.size} of up to "
            f"{most} fit, but got {x}; pass a float, or a NumPy integer to let it wrap around"
        )


def check_empty(context: Context, shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of an array to be allocated."""
    try:
        kind = dtype_named(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{context.where}: {dtype!r} is no dtype: {error}") from error
    if str(kind) not in DTYPES[1:]:
        raise UsageError(
            f"{context.where}: dtype {kind} is not supported; use one of {', '.join(DTYPES[1:])}"
        )
    lengths = (shape,) if is_whole(shape) else shape
    if isinstance(lengths, str) or not isinstance(lengths, Sequence | np.ndarray):
        raise UsageError(f"{context.where} takes a length or a shape, but got {shape!r}")
    if not all(is_whole(length) and length >= 0 for length in lengths):
        raise UsageError(
            f"{context.where}: shape {shape!r} has a length that is negative or no whole number"
        )
    plain = tuple(int(length) for length in lengths)
    if math.prod(plain) * kind.itemsize >= _BYTES_LIMIT:
        raise OutOfMemoryError(
            f"{context.where}: no machine has the {math.prod(plain) * kind.itemsize} bytes that "
            f"shape {shape!r} of {kind} takes"
        )
    return plain, kind


def check_out(name: str, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Check that a result fits an output array, of the host or of a device."""
    if (tuple(out.shape), out.dtype) != (shape, dtype):
        raise ShapeError(
            f"{name} must have shape {shape} and dtype {dtype}, but has {tuple(out.shape)} and "
            f"{out.dtype}"
        )
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise UsageError(f"{name} is read-only; pass a writable array")


def check_outs(context: Context, out: Any, count: int) -> None:
    """Check that there is an output for each array of a list."""
    if not isinstance(out, list | tuple) or len(out) != count:
        got = f"has {len(out)}" if isinstance(out, list | tuple) else f"is {type(out).__name__}"
        raise UsageError(f"{context.where}: out must be a list of {count} arrays, but {got}")


def check_stays(context: Context, **arrays: Any) -> None:
    """Refuse arrays that a call would have to copy: a prepared call uses them in place."""
    for name, array in arrays.items():
        found = type(array).__name__
        if isinstance(array, np.ndarray):
            if array.flags.c_contiguous:
                continue
            found = f"an array with strides {array.strides}"
        raise UsageError(
            f"{context.where}: {name} must be a contiguous NumPy array to be used again and again, "
            f"but is {found}; call {context.collective} each time instead"
        )
