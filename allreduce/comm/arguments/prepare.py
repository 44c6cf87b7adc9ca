"""Check the arguments of collectives, and prepare them for transports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from allreduce.comm.arguments import call_text, checks, scaling
from allreduce.comm.arguments.arrays import BorrowedArray, borrow, borrow_out
from allreduce.comm.arguments.checks import UNSCALED, Context, Options
from allreduce.comm.arguments.overlap import check_overlap
from allreduce.comm.calls.call import COUNT_LIMIT, ROOTED, TO_ROOT, WHOLE, Array, Call
from allreduce.errors import OutOfMemoryError, ShapeError, UnsupportedError


class Prepared(NamedTuple):
    """A checked call: contiguous arrays, and how the caller's result comes from them."""

    call: Call
    x: Array | None
    out: Array | None
    result: Callable[[], Any]


def prepare(context: Context, x: Any, options: Options, out: Any, whole: Any = None) -> Prepared:
    """Check a call's arguments.

    Args:
        x: An array or number, as `arrays.borrow` takes it; None on members that only receive.
        out: The caller's output array, or None for a new one. Ignored on members that receive
            nothing.
        whole: The root's array as (dtype, shape), for a scatter without `x`.

    Raises:
        UsageError: An argument is of the wrong kind; ShapeError if only its shape or dtype is.
        UnsupportedError: The transport does not carry this operator on this type.
    """
    borrowed = borrow(context.where, x, _takes(context)) if whole is None or x is not None else None
    dtype, shape = whole if borrowed is None else (borrowed.array.dtype, borrowed.array.shape)
    options = checked_options(context, x, options, dtype)
    wanted = result_shape(context, shape, options)
    call = describe(context, options, dtype, shape)  # before anything so large is allocated
    target = _target(context, borrowed, options, out, wanted, dtype)
    source = buffer = None
    if target is not None:
        plain = target.flags.c_contiguous
        buffer = target if plain else new_output(context, target.shape, target.dtype)
    if borrowed is not None:
        own = buffer if out is None or buffer is not target else None  # no other array's memory
        source = _source(context, borrowed.array, options, own)

    def result() -> Any:
        if target is None or buffer is None:
            return None
        if options.scale[1] != 1:
            scaling.apply(buffer, options.scale[1], buffer)
        if buffer is not target:
            target[...] = buffer
        if out is not None:
            return out
        return target if borrowed is None else borrowed.answer(target)

    return Prepared(call, source, buffer, result)


def _target(
    context: Context,
    borrowed: BorrowedArray | None,
    options: Options,
    out: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> Array | None:
    """Return the array that the result goes to, if any arrives here: the caller's or a new one."""
    if context.collective in TO_ROOT and context.rank != options.root:
        return None
    if out is None:
        return new_output(context, shape, dtype)
    name = f"{context.where}: out"
    target = borrow_out(name, out)
    checks.check_out(name, target, shape, dtype)
    if borrowed is not None:
        check_overlap(context, borrowed.array, target, options)
    return target


def _takes(context: Context) -> str:
    if context.collective == "broadcast":
        return "takes an array or a number on every rank, of the root's shape and dtype"
    return "takes an array or a number"


def checked_options(context: Context, x: Any, options: Options, dtype: np.dtype[Any]) -> Options:
    """Check the other arguments, and convert them to plain numbers."""
    checks.check_op(context, options.op, dtype)
    checks.check_number(context, x, options.op)
    changes: dict[str, Any] = {}
    if options.scale is not UNSCALED:
        changes["scale"] = scaling.check_factors(context, options.scale, options.op, dtype)
    if context.collective in ROOTED:
        changes["root"] = checks.check_root(context, options.root)
    if options.counts is not None:
        changes["counts"] = checks.check_counts(context, options.counts)
    return replace(options, **changes) if changes else options


def _source(context: Context, array: Array, options: Options, own: Array | None) -> Array:
    """Return the contiguous input; a copy lies in the call's `own` result, if that has its place.

    There it takes no memory, and the call works in place. Where the caller brings the output it
    must not, for that may not be touched before the members are known to agree.
    """
    if options.scale[0] == 1 and array.flags.c_contiguous:
        return array
    copy = None if own is None else _part(context, own, array.shape, options)
    if copy is None:
        copy = new_output(context, array.shape, array.dtype)
    if context.collective == "broadcast" and context.rank != options.root:
        return copy  # its values are not read
    if options.scale[0] != 1:
        return scaling.apply(array, options.scale[0], copy)
    copy[...] = array
    return copy


def _part(
    context: Context, result: Array, shape: tuple[int, ...], options: Options
) -> Array | None:
    """Return the part of a result that the own input may lie in, if there is one."""
    if context.collective in WHOLE:
        return result
    if context.collective not in checks.JOINS:
        return None
    rows = shape[0] if shape else 1
    counts = options.counts
    first = context.rank * rows if counts is None else sum(counts[: context.rank])
    return result[first : first + rows].reshape(shape)


def new_output(context: Context, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a new array.

    Raises:
        OutOfMemoryError: There is no memory for it.
    """
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:  # the latter where an address cannot say so much
        raise OutOfMemoryError(
            f"{context.where}: this rank has no memory for an array of shape {shape} and dtype "
            f"{dtype}: {error}; pass the array in pieces, or run fewer ranks on this host"
        ) from error


def contiguous(context: Context, array: Array) -> Array:
    """Return the array if its elements lie in order, one after the other, or such a copy.

    Raises:
        OutOfMemoryError: There is no memory for a copy.
    """
    if array.flags.c_contiguous:
        return array
    copy = new_output(context, array.shape, array.dtype)
    copy[...] = array
    return copy


def describe(
    context: Context, options: Options, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Call:
    """Describe the call; `shape` is the input's, of the root where others have none."""
    row = math.prod(shape[1:])
    size = math.prod(shape)
    counts = receives = None
    if options.counts is not None:
        counts = tuple(count * row for count in options.counts)
        size = 0 if context.collective == "all_to_all" else sum(counts)
    elif context.collective in (*checks.CUTS, "all_to_all"):
        size //= context.size
    if options.receives is not None:
        receives = tuple(count * row for count in options.receives)
    most = max(size, sum(counts or ()), sum(receives or ()))
    if most >= COUNT_LIMIT:
        raise UnsupportedError(
            f"{context.where} carries fewer than {COUNT_LIMIT} elements, but got {most}; "
            "pass the array in pieces"
        )
    return Call(
        context.collective,
        options.op,
        str(dtype),
        size,
        options.root,
        context.group,
        counts,
        receives,
        call_text=options.call_text
        or call_text.of_array(context.collective, dtype, shape, options),
        row=row,
    )


def result_shape(context: Context, shape: tuple[int, ...], options: Options) -> tuple[int, ...]:
    """Return the shape of this member's result; for all_to_all, if it receives as much as it sends.

    Raises:
        ShapeError: The input's shape and the counts do not fit.
    """
    name, counts, size = context.collective, options.counts, context.size
    if name in checks.JOINS:
        rows, rest = (shape[0], shape[1:]) if shape else (1, ())
        if counts is None:
            return (rows * size, *rest)
        if counts[context.rank] != rows:
            raise ShapeError(
                f"{context.where} got {rows} rows, but counts say {counts[context.rank]} for this "
                "member"
            )
        return (sum(counts), *rest)
    if name not in (*checks.CUTS, "all_to_all"):
        return shape
    if not shape or (counts is None and shape[0] % size):
        far = name == "scatter" and context.rank != options.root
        whose = f"root {options.root}'s array has shape" if far else "the array's shape is"
        raise ShapeError(
            f"{context.where} cuts axis 0 into {size} equal shares, but {whose} "
            f"{shape}{'' if not shape else '; pass counts of rows per member'}"
        )
    if counts is not None and sum(counts) != shape[0]:
        raise ShapeError(
            f"{context.where} got counts {list(counts)}, {sum(counts)} rows in all, for an array "
            f"of {shape[0]} rows"
        )
    if name == "all_to_all":
        return shape if options.receives is None else (sum(options.receives), *shape[1:])
    own = shape[0] // size if counts is None else counts[context.rank]
    return (own, *shape[1:])
