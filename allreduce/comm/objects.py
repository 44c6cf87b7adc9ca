"""Plain Python data between members: numbers, strings, bytes, lists and dicts, as MessagePack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from allreduce.comm.arrays import borrow
from allreduce.comm.base import Array
from allreduce.errors import UsageError

if TYPE_CHECKING:
    from allreduce.comm.collectives import Collectives

_BYTE = np.uint8


def encode(where: str, value: Any) -> Array:
    """Write plain data as bytes."""
    try:
        packed = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{where} carries numbers of up to 64 bits, strings, bytes, None, lists and dicts, but "
            f"not this {type(value).__name__}: {error}"
        ) from error
    return np.frombuffer(packed, _BYTE)


def decode(data: Array) -> Any:
    """Read what `encode` wrote."""
    return msgpack.unpackb(data.tobytes(), raw=False, strict_map_key=False)


def broadcast(comm: Collectives, value: Any, root: int) -> Any:
    """Give every member the root's data: its length, then its bytes."""
    data = np.empty(0, _BYTE)
    if comm.rank == root:
        data = encode(f"rank {comm.rank}: broadcast_object", value)
    length = comm.broadcast(len(data), root=root)
    room = data if comm.rank == root else np.empty(length, _BYTE)
    return decode(comm.broadcast(room, root=root))


def gather(comm: Collectives, value: Any, root: int) -> list[Any] | None:
    """Give the root every member's data."""
    data = encode(f"rank {comm.rank}: gather_object", value)
    lengths = comm.all_gather(len(data)).tolist()
    joined = comm.gather(data, root=root, counts=lengths)
    return None if joined is None else _split(joined, lengths)


def all_gather(comm: Collectives, value: Any) -> list[Any]:
    """Give every member every member's data."""
    data = encode(f"rank {comm.rank}: all_gather_object", value)
    lengths = comm.all_gather(len(data)).tolist()
    return _split(comm.all_gather(data, counts=lengths), lengths)


def announce(comm: Collectives, x: Any, root: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Tell every member the dtype and shape of the root's array.

    A root that has none, or none that can be carried, fails after it has told the others.
    """
    error = ""
    facts: list[Any] = []
    if comm.rank == root:
        try:
            if x is None:
                raise UsageError(f"rank {comm.rank}: scatter takes an array on its root, not None")
            array = borrow(f"rank {comm.rank}: scatter", x).array
            facts = [str(array.dtype), list(array.shape)]
        except UsageError as failure:
            error = str(failure)
    found = comm.broadcast_object([error, *facts], root=root)
    if found[0]:
        raise UsageError(found[0])
    return _dtype(found[1]), tuple(found[2])


def checked_counts(comm: Collectives, collective: str, counts: Sequence[int]) -> Array:
    """Return counts of rows per member as an array."""
    if len(counts) != comm.size or any(int(count) != count or count < 0 for count in counts):
        raise UsageError(
            f"rank {comm.rank}: {collective} takes counts of {comm.size} members' rows, but got "
            f"{list(counts)!r}"
        )
    return np.asarray(counts, np.int64)


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":  # a type that NumPy knows only with this library
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)


def _split(joined: Array, lengths: Sequence[int]) -> list[Any]:
    values, low = [], 0
    for length in lengths:
        values.append(decode(joined[low : low + length]))
        low += length
    return values
