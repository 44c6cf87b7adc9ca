"""Plain Python data between members: numbers, strings, bytes, lists and dicts, as MessagePack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from allreduce.comm import checks
from allreduce.comm.arrays import borrow, dtype_named
from allreduce.comm.base import Array
from allreduce.comm.caller import Caller
from allreduce.comm.checks import Context, Options
from allreduce.errors import UnsupportedError, UsageError

_BYTE = np.uint8


class Objects(Caller):
    """Plain Python data for all members: slower than arrays, and of any length."""

    def broadcast_object(self, value: Any = None, *, root: int = 0) -> Any:
        """Give every member the root's plain data.

        Args:
            value: Numbers, strings, bytes, None, and lists and dicts of them. Nothing is pickled;
                tuples arrive as lists. Ignored on the others.
            root: The member whose data counts.
        """
        return broadcast(self, self._context("broadcast_object"), value, root)

    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """Give the root every member's plain data, by rank; the others get None."""
        return gather(self, value, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Give every member every member's plain data, by rank."""
        return all_gather(self, value)


def encode(where: str, value: Any) -> Array:
    """Write plain data as bytes.

    Raises:
        UsageError: It is not plain, or could not be read again.
    """
    try:
        packed = msgpack.packb(value, use_bin_type=True)
        _unpack(packed)  # a key that arrives as a list is none
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{where} carries numbers of up to 64 bits, strings, bytes, None, lists and dicts with "
            f"keys that are no tuples, but not this {type(value).__name__}: {error}"
        ) from error
    return np.frombuffer(packed, _BYTE)


def decode(data: Array) -> Any:
    """Read what `encode` wrote."""
    return _unpack(data.tobytes())


def broadcast(comm: Caller, context: Context, value: Any, root: Any) -> Any:
    """Give every member the root's data: its length, then its bytes.

    A root whose data cannot be carried tells the others why, under a negative length.
    """
    root = checks.check_root(context, root)
    options = Options(root=root, typed=f"{context.collective}(root={root})")
    room, length = np.empty(0, _BYTE), 0
    if comm.rank == root:
        try:
            room = encode(context.where, value)
            length = len(room)
        except UsageError as failure:
            room = np.frombuffer(str(failure).encode(errors="replace"), _BYTE)
            length = -len(room)
    length = comm._start("broadcast", length, options).wait()
    if comm.rank != root:
        room = np.empty(abs(length), _BYTE)
    told = comm._start("broadcast", room, options).wait()
    if length < 0:
        raise UsageError(told.tobytes().decode())
    return decode(told)


def gather(comm: Caller, value: Any, root: Any) -> list[Any] | None:
    """Give the root every member's data."""
    context = comm._context("gather_object")
    root = checks.check_root(context, root)
    typed = f"gather_object(root={root})"
    data, lengths = _exchange_lengths(comm, context, value, typed)
    joined = comm._start("gather", data, Options(root=root, counts=lengths, typed=typed)).wait()
    return None if joined is None else _split(joined, lengths)


def all_gather(comm: Caller, value: Any) -> list[Any]:
    """Give every member every member's data."""
    typed = "all_gather_object()"
    data, lengths = _exchange_lengths(comm, comm._context("all_gather_object"), value, typed)
    joined = comm._start("all_gather", data, Options(counts=lengths, typed=typed)).wait()
    return _split(joined, lengths)


def _exchange_lengths(
    comm: Caller, context: Context, value: Any, typed: str
) -> tuple[Array, Sequence[int]]:
    """Return this member's encoded data, and the lengths of all.

    Raises:
        UsageError: A member's data cannot be carried; raised on all members.
    """
    failure: UsageError | None = None
    data = np.empty(0, _BYTE)
    try:
        data = encode(context.where, value)
    except UsageError as error:
        failure = error
    mine = np.array([-1 if failure else len(data)])
    lengths: list[int] = comm._start("all_gather", mine, Options(typed=typed)).wait().tolist()
    if failure is not None:
        raise failure
    if -1 in lengths:
        raise UsageError(
            f"{context.where}: {comm._called(lengths.index(-1))} has passed what cannot be "
            "carried; its own error tells what"
        )
    return data, lengths


def announce(
    comm: Caller, context: Context, x: Any, root: int
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Tell every member the dtype and shape of the root's array.

    A root that has none, or none that can be carried, fails after it has told the others.
    """
    told: list[Any] = []
    if comm.rank == root:
        try:
            array = borrow(context.where, x, "takes an array on its root").array
            checks.check_op(context, None, array.dtype)
            told = ["", str(array.dtype), list(array.shape)]
        except (UsageError, UnsupportedError) as failure:
            told = ["unsupported" if isinstance(failure, UnsupportedError) else "usage"]
            told.append(str(failure))
    found = broadcast(comm, context, told, root)
    if found[0]:
        raise (UnsupportedError if found[0] == "unsupported" else UsageError)(found[1])
    return dtype_named(found[1]), tuple(found[2])


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=False)


def _split(joined: Array, lengths: Sequence[int]) -> list[Any]:
    values, low = [], 0
    for length in lengths:
        values.append(decode(joined[low : low + length]))
        low += length
    return values
