"""What callers pass to collectives: checked, and brought into the form that transports take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from allreduce.comm import checks
from allreduce.comm.arrays import borrow
from allreduce.comm.base import Array
from allreduce.comm.call import COUNT_LIMIT, ROOTED, Call
from allreduce.comm.checks import Context, Options
from allreduce.errors import ShapeError, UnsupportedError, UsageError

_TO_ROOT = ("reduce", "gather")


@dataclass(frozen=True)
class Prepared:
    """A checked call: contiguous arrays, and how the caller's result comes from them."""

    call: Call
    x: Array | None
    out: Array | None
    result: Callable[[], Any]


def prepare(context: Context, x: Any, options: Options, out: Any, whole: Any = None) -> Prepared:
    """Check a call's arguments.

    Args:
        x: An array or number, as `arrays.borrow` takes it; None on those who only receive.
        out: The caller's output array, or None for a new one. Ignored where nothing arrives.
        whole: The root's array as (dtype, shape), for a scatter without `x`.

    Raises:
        UsageError: An argument is of the wrong kind; ShapeError if only its shape or dtype is.
        UnsupportedError: The transport does not carry this operator on this type.
    """
    lent = None if x is None else borrow(context.where, x)
    dtype, shape = whole if lent is None else (lent.array.dtype, lent.array.shape)
    checks.check_op(context, options.op, dtype)
    if context.collective in ROOTED:
        options = replace(options, root=checks.check_root(context, options.root))
    source = None if lent is None else _source(context, lent.array, options)
    target = buffer = answer = None
    if context.collective not in _TO_ROOT or context.rank == options.root:
        wanted = _result_shape(context, shape, options)
        target, answer = _target(context, out, wanted, dtype)
        if answer is None:
            answer = lent.answer if lent is not None else _same
        buffer = target if target.flags.c_contiguous else np.empty(wanted, dtype)
    if source is not None and buffer is not None and buffer is target:
        checks.check_overlap(context, source, buffer, options)

    def result() -> Any:
        if target is None or answer is None or buffer is None:
            return None
        if options.scale[1] != 1:
            np.multiply(buffer, options.scale[1], out=buffer, casting="same_kind")
        if buffer is not target:
            target[...] = buffer
        return answer(target)

    return Prepared(_call(context, options, dtype, shape), source, buffer, result)


def _same(result: Any) -> Any:
    return result


def _source(context: Context, array: Array, options: Options) -> Array:
    if options.scale[0] != 1 or options.scale[1] != 1:
        if options.op not in ("sum", "mean") or array.dtype.kind not in "fcV":
            raise UnsupportedError(
                f"{context.where} with operator {options.op} does not scale {array.dtype}: there "
                "are sum and mean of floating-point and complex types"
            )
        if options.scale[0] != 1:
            array = np.asarray(array * options.scale[0]).astype(array.dtype)
    return np.ascontiguousarray(array).reshape(array.shape)


def _target(
    context: Context, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[Array, Callable[[Array], Any] | None]:
    """Return the output array, and how it is answered if that is not as the input was given."""
    if out is None:
        return np.empty(shape, dtype), None
    if isinstance(out, np.generic | int | float | complex):
        raise UsageError(f"{context.where}: out must be an array, not {type(out).__name__}")
    array = borrow(f"{context.where}: out", out).array
    return checks.check_out(context, array, shape, dtype), lambda _: out


def _call(context: Context, options: Options, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Call:
    """Describe the call; `shape` is the input's, of the root where others have none."""
    row = math.prod(shape[1:])
    size = math.prod(shape)
    counts = receives = None
    if options.counts is not None:
        counts = tuple(int(count) * row for count in options.counts)
        size = 0 if context.collective == "all_to_all" else sum(counts)
    elif context.collective in (*checks.CUTS, "all_to_all"):
        size //= context.size
    if max(size, sum(counts or ())) >= COUNT_LIMIT:
        raise UnsupportedError(
            f"{context.where} carries fewer than {COUNT_LIMIT} elements, but got {size}; "
            "pass the array in pieces"
        )
    if options.receives is not None:
        receives = tuple(int(count) * row for count in options.receives)
    return Call(
        context.collective,
        options.op,
        str(dtype),
        size,
        options.root,
        context.group,
        counts,
        receives,
    )


def _result_shape(context: Context, shape: tuple[int, ...], options: Options) -> tuple[int, ...]:
    name, counts, size = context.collective, options.counts, context.size
    if name in checks.JOINS:
        rows, rest = (shape[0], shape[1:]) if shape else (1, ())
        if counts is None:
            return (rows * size, *rest)
        checks.check_counts(context, counts, None)
        if counts[context.rank] != rows:
            raise ShapeError(
                f"{context.where} got {rows} rows, but counts say {counts[context.rank]} for this "
                "member"
            )
        return (sum(counts), *rest)
    if name not in (*checks.CUTS, "all_to_all"):
        return shape
    if not shape or (counts is None and shape[0] % size):
        raise ShapeError(
            f"{context.where} cuts axis 0 into {size} equal shares, but the array's shape is "
            f"{shape}{'' if not shape else '; pass counts of rows per member'}"
        )
    if counts is not None:
        checks.check_counts(context, counts, shape[0])
    if name == "all_to_all":
        return shape if options.receives is None else (sum(options.receives), *shape[1:])
    own = shape[0] // size if counts is None else counts[context.rank]
    return (int(own), *shape[1:])
