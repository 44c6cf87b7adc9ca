"""What callers pass to collectives: checked, and brought into the form that transports take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm.base import Array
from allreduce.comm.call import CARRIES, COUNT_LIMIT, DTYPES, OPERATORS, Call, remedy
from allreduce.errors import ShapeError, UnsupportedError, UsageError, unknown_name


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
class Prepared:
    """A checked call: contiguous arrays, and how the caller's result comes from them."""

    call: Call
    x: Array
    out: Array
    result: Callable[[], Any]


def prepare(context: Context, x: Any, op: str | None, root: int | None, out: Any) -> Prepared:
    """Check a call's arguments.

    Args:
        x: An array, a NumPy scalar, or a Python number.
        out: The caller's output array, or None for a new one.

    Raises:
        UsageError: An argument is of the wrong kind; ShapeError if only its shape or dtype is.
        UnsupportedError: The transport does not carry this operator on this type.
    """
    source = _as_array(context, x)
    _check_op(context, op, source.dtype)
    if root is not None:
        root = _check_root(context, root)
    shape = _result_shape(context, source.shape)
    if out is None:
        target = np.empty(shape, source.dtype)
    else:
        target = _check_out(context, out, shape, source.dtype)
    source = np.ascontiguousarray(source).reshape(source.shape)
    buffer = target if target.flags.c_contiguous else np.empty(shape, source.dtype)
    if buffer is target:
        _check_overlap(context, source, target)
    share = target if context.collective == "reduce_scatter" else source
    if share.size >= COUNT_LIMIT:
        raise UnsupportedError(
            f"{context.where} carries fewer than {COUNT_LIMIT} elements, but got {share.size}; "
            "pass the array in pieces"
        )
    call = Call(context.collective, op, str(source.dtype), share.size, root, context.group)

    def result() -> Any:
        if buffer is not target:
            target[...] = buffer
        return target if out is not None else _like(x, target)

    return Prepared(call, source, buffer, result)


def _as_array(context: Context, x: Any) -> Array:
    if isinstance(x, np.ndarray | np.generic) or type(x) in (int, float):
        try:
            return np.asarray(x, np.int64 if type(x) is int else None)
        except OverflowError as error:
            raise UsageError(f"{context.where}: {x} does not fit into 64 bits") from error
    raise UsageError(
        f"{context.where} takes a NumPy array or a number, but got {type(x).__name__}; "
        "convert it with numpy.asarray"
    )


def _check_op(context: Context, op: str | None, dtype: np.dtype[Any]) -> None:
    name = str(dtype)
    if op is not None and op not in OPERATORS[1:]:
        raise unknown_name("operator", op, OPERATORS[1:])
    suffix = f" with operator {op}" if op else ""
    if name not in DTYPES[1:]:
        raise UnsupportedError(
            f"{context.where}{suffix} does not carry {name}: "
            f"there are {', '.join(DTYPES[1:])}; convert with astype"
        )
    if op is not None and name not in CARRIES[op]:
        raise UnsupportedError(f"{context.where}{suffix} does not carry {name}: {remedy(op, name)}")


def _check_root(context: Context, root: Any) -> int:
    if not isinstance(root, int | np.integer) or not 0 <= root < context.size:
        raise UsageError(
            f"{context.where} got root={root!r}; expected a rank from 0 to {context.size - 1}"
        )
    return int(root)  # a NumPy integer of 8 bits could not be packed


def _result_shape(context: Context, shape: tuple[int, ...]) -> tuple[int, ...]:
    if context.collective == "all_gather":
        rows, rest = (shape[0], shape[1:]) if shape else (1, ())
        return (rows * context.size, *rest)
    if context.collective == "reduce_scatter":
        if not shape or shape[0] % context.size:
            raise ShapeError(
                f"{context.where} cuts axis 0 into {context.size} equal shares, but the array's "
                f"shape is {shape}"
            )
        return (shape[0] // context.size, *shape[1:])
    return shape


def _check_out(context: Context, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if not isinstance(out, np.ndarray):
        raise UsageError(f"{context.where}: out must be a NumPy array, not {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype:
        raise ShapeError(
            f"{context.where}: out must have shape {shape} and dtype {dtype}, but has "
            f"{out.shape} and {out.dtype}"
        )
    if not out.flags.writeable:
        raise UsageError(f"{context.where}: out is read-only")
    return out


def _check_overlap(context: Context, x: Array, out: Array) -> None:
    """Allow the same memory, or the own rows of a gathered array; refuse other overlaps."""
    if not np.may_share_memory(x, out) or x.size == 0:
        return
    own = out[context.rank * len(x) :] if context.collective == "all_gather" and x.ndim else out
    in_place = x.ctypes.data == own.ctypes.data
    if context.collective == "reduce_scatter" or not in_place:
        raise UsageError(
            f"{context.where}: out overlaps the input without being the same memory; "
            "pass another array, or a copy"
        )


def _like(x: Any, result: Array) -> Any:
    """Return a number for a number, and an array for an array."""
    if isinstance(x, np.ndarray) or result.ndim:
        return result
    return result[()] if isinstance(x, np.generic) else result.item()
