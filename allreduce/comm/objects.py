"""Plain Python data between members: numbers, strings, bytes, lists and dicts, as MessagePack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from allreduce.comm import checks
from allreduce.comm.arguments import room
from allreduce.comm.array import Array
from allreduce.comm.arrays import borrow, dtype_named
from allreduce.comm.caller import Caller
from allreduce.comm.checks import Context, Options
from allreduce.comm.stages import PIECE_BYTES, Stages, as_it_is
from allreduce.errors import UnsupportedError, UsageError

_BYTE = np.uint8


class Objects(Caller):
    """Plain Python data for all members: slower than arrays, and of any length.

    Common arguments:
        value: Numbers, strings, bytes, None, and lists and dicts of them. Nothing is pickled;
            tuples arrive as lists, and NumPy's numbers as Python's.
        root: The member that gives or gets.
        async_op: Return a `Work` without waiting, which gives the data. The value may be changed
            from then on.
    """

    def broadcast_object(self, value: Any = None, *, root: int = 0, async_op: bool = False) -> Any:
        """Give every member the root's plain data; the others' is ignored."""
        context = self._context("broadcast_object")
        return self._staged(context, broadcast(self, context, value, root), async_op)

    def gather_object(self, value: Any, *, root: int = 0, async_op: bool = False) -> Any:
        """Give the root a list of every member's plain data, by rank; the others get None."""
        context = self._context("gather_object")
        return self._staged(context, gather(self, context, value, root), async_op)

    def all_gather_object(self, value: Any, *, async_op: bool = False) -> Any:
        """Give every member a list of every member's plain data, by rank."""
        context = self._context("all_gather_object")
        return self._staged(context, all_gather(self, context, value), async_op)


def encode(where: str, value: Any) -> Array:
    """Write plain data as bytes.

    Raises:
        UsageError: It is not plain, or could not be read again.
    """
    return _written(where, value)[0]


def _written(where: str, value: Any) -> tuple[Array, Any]:
    """Return plain data as bytes, and as what reads them gets it."""
    try:
        packed = msgpack.packb(value, use_bin_type=True, default=_as_python)
        arrived = _unpack(packed)  # a key that arrives as a list is none
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{where} carries numbers of up to 64 bits, strings, bytes, None, lists and dicts with "
            f"keys that are no tuples, but not this {type(value).__name__}: {error}"
        ) from None
    return np.frombuffer(packed, _BYTE), arrived


def _as_python(value: Any) -> Any:
    """Give the Python number that one of NumPy's is; anything else as it is, to be refused."""
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "biuf" else value


def decode(data: Array) -> Any:
    """Read what `encode` wrote."""
    return _unpack(data.data)


def broadcast(comm: Caller, context: Context, value: Any, root: Any) -> Stages:
    """Give every member the root's data: its length, then its bytes.

    A root whose data cannot be carried tells the others why, under a negative length.
    """
    root = checks.check_root(context, root)
    options = Options(root=root, typed=f"{context.collective}(root={root})")
    if comm.rank != root:
        return _receive(comm, context, options)
    try:
        data, arrived = _written(context.where, value)
    except UsageError as failure:
        told = str(failure).encode(errors="replace")
        return _tell(comm, options, np.frombuffer(told, _BYTE), -len(told), failure)
    return _tell(comm, options, data, len(data), arrived)


def _tell(comm: Caller, options: Options, data: Array, length: int, arrived: Any) -> Stages:
    """Be the root, for whom its data, or the error that is told instead, have `arrived` before."""
    yield comm._stage("broadcast", length, options)
    low = 0
    while len(data) - low > PIECE_BYTES:  # its result is a copy, which nobody needs
        yield comm._stage("broadcast", data[low : low + PIECE_BYTES], options)
        low += PIECE_BYTES

    def answer(_: Any) -> Any:
        if isinstance(arrived, UsageError):
            raise arrived
        return arrived

    return comm._stage("broadcast", data[low:], options), answer


def _receive(comm: Caller, context: Context, options: Options) -> Stages:
    length: int = yield comm._stage("broadcast", 0, options)
    data = room(context, (abs(length),), np.dtype(_BYTE))
    low = 0
    while len(data) - low > PIECE_BYTES:
        part = data[low : low + PIECE_BYTES]
        yield comm._stage("broadcast", part, options, part)
        low += PIECE_BYTES

    def read(_: Any) -> Any:
        if length < 0:
            raise UsageError(data.tobytes().decode())
        return decode(data)

    return comm._stage("broadcast", data[low:], options, data[low:]), read


def gather(comm: Caller, context: Context, value: Any, root: Any) -> Stages:
    """Give the root every member's data."""
    root = checks.check_root(context, root)
    options = Options(root=root, typed=f"gather_object(root={root})")
    return _join(comm, "gather", context, options, *_encoded(context, value))


def all_gather(comm: Caller, context: Context, value: Any, purpose: str = "") -> Stages:
    """Give every member every member's data."""
    options = Options(typed=f"{context.collective}({purpose})")
    return _join(comm, "all_gather", context, options, *_encoded(context, value))


def _encoded(context: Context, value: Any) -> tuple[Array, UsageError | None]:
    """Return a member's data as bytes, or why it cannot be carried."""
    try:
        return encode(context.where, value), None
    except UsageError as failure:
        return np.empty(0, _BYTE), failure


def _join(
    comm: Caller,
    collective: str,
    context: Context,
    options: Options,
    data: Array,
    failure: UsageError | None,
) -> Stages:
    """Exchange the lengths of all members' data, then the data.

    Raises:
        UsageError: A member's data cannot be carried; raised on all members.
    """
    mine = np.array([-1 if failure else len(data)])
    told: Array = yield comm._stage("all_gather", mine, Options(typed=options.typed))
    lengths: list[int] = told.tolist()
    if failure is not None:
        raise failure
    if -1 in lengths:
        raise UsageError(
            f"{context.where}: {comm._called(lengths.index(-1))} has passed what cannot be "
            "carried; its own error tells what"
        )

    def read(joined: Array | None) -> list[Any] | None:
        return None if joined is None else _split(joined, lengths)

    return comm._stage(collective, data, replace(options, counts=lengths)), read


def scatter(
    comm: Caller, context: Context, x: Any, root: Any, counts: Sequence[int] | None, out: Any
) -> Stages:
    """Tell every member the dtype and shape of the root's array, and then scatter it.

    A root that has none, or none that can be carried, fails after it has told the others; another
    member that passes one fails at once.
    """
    root = checks.check_root(context, root)
    if x is not None and comm.rank != root:
        raise UsageError(
            f"{context.where} takes an array on its root alone, which is {comm._called(root)}, but "
            f"got {type(x).__name__} here: pass None, or name this member as the root on all"
        )
    if counts is not None:
        counts = checks.check_counts(context, counts)
    told: list[Any] = []
    if comm.rank == root:
        try:
            array = borrow(context.where, x, "takes an array on its root").array
            checks.check_op(context, None, array.dtype)
            told = ["", str(array.dtype), list(array.shape)]
        except (UsageError, UnsupportedError) as failure:
            told = ["unsupported" if isinstance(failure, UnsupportedError) else "usage"]
            told.append(str(failure))
    announced = broadcast(comm, context, told, root)
    return _scatter(comm, announced, x, Options(root=root, counts=counts), out)


def _scatter(comm: Caller, announced: Stages, x: Any, options: Options, out: Any) -> Stages:
    last, read = yield from announced
    assert last is not None, "a broadcast has two stages"
    failure, *found = read((yield last))
    if failure:
        raise (UnsupportedError if failure == "unsupported" else UsageError)(found[0])
    whole = dtype_named(found[0]), tuple(found[1])
    mine = x if comm.rank == options.root else None
    return comm._stage("scatter", mine, options, out, whole), as_it_is


def _unpack(packed: bytes | memoryview) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=False)


def _split(joined: Array, lengths: Sequence[int]) -> list[Any]:
    values, low = [], 0
    for length in lengths:
        values.append(decode(joined[low : low + length]))
        low += length
    return values
