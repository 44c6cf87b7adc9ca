"""Plain Python data between members, as MessagePack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from allreduce.comm.arguments import checks
from allreduce.comm.arguments.checks import Context, Options
from allreduce.comm.arguments.prepare import new_output
from allreduce.comm.calls.call import Array
from allreduce.comm.dispatch import Dispatcher
from allreduce.errors import UsageError

_BYTE = np.uint8


def encode(where: str, value: Any) -> Array:
    """Write plain data as bytes.

    Raises:
        UsageError: It is not plain, or could not be read again.
    """
    return _written(where, value)[0]


def _written(where: str, value: Any) -> tuple[Array, Any]:
    """Encode plain data; return the bytes, and the value that a reader gets."""
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
    """Convert a NumPy scalar to a Python number; return anything else unchanged, to be refused."""
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "biuf" else value


def decode(data: Array) -> Any:
    """Decode the bytes of `encode`."""
    return _unpack(data.data)


def broadcast_object(comm: Dispatcher, context: Context, value: Any, root: Any) -> Any:
    """Give every member the root's data: its length, then its bytes.

    A root whose data cannot be carried sends the reason instead, under a negative length.
    """
    root = checks.check_root(context, root)
    options = Options(root=root, call_text=f"{context.collective}(root={root})")
    if comm.rank != root:
        length = int(comm.step("broadcast", 0, options))
        data = new_output(context, (abs(length),), np.dtype(_BYTE))
        comm.step("broadcast", data, options, data)
        if length < 0:
            raise UsageError(data.tobytes().decode())
        return decode(data)
    try:
        data, arrived = _written(context.where, value)
        length = len(data)
    except UsageError as failure:
        data, arrived = np.frombuffer(str(failure).encode(errors="replace"), _BYTE), failure
        length = -len(data)
    comm.step("broadcast", length, options)
    comm.step("broadcast", data, options)
    if isinstance(arrived, UsageError):
        raise arrived
    return arrived


def gather_object(comm: Dispatcher, context: Context, value: Any, root: Any) -> list[Any] | None:
    """Give the root every member's data."""
    root = checks.check_root(context, root)
    return _join(
        comm, "gather", context, Options(root=root, call_text=f"gather_object(root={root})"), value
    )


def all_gather_object(
    comm: Dispatcher, context: Context, value: Any, purpose: str = ""
) -> list[Any]:
    """Give every member every member's data."""
    options = Options(call_text=f"{context.collective}({purpose})")
    found = _join(comm, "all_gather", context, options, value)
    assert found is not None, "every member gets the data"
    return found


def _join(
    comm: Dispatcher, collective: str, context: Context, options: Options, value: Any
) -> list[Any] | None:
    """Exchange the lengths of all members' data, then the data.

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
    lengths: list[int] = comm.step(
        "all_gather", mine, Options(call_text=options.call_text)
    ).tolist()
    if failure is not None:
        raise failure
    if -1 in lengths:
        member = comm.transport.called(lengths.index(-1))
        raise UsageError(
            f"{context.where}: {member} has passed data that cannot be encoded; its own error has "
            "the details"
        )
    joined = comm.step(collective, data, replace(options, counts=lengths))
    if joined is None:
        return None
    return [decode(part) for part in np.split(joined, np.cumsum(lengths[:-1]))]


def _unpack(packed: bytes | memoryview) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=False)
