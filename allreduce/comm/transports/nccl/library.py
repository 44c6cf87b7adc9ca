"""NCCL as it is called: dtypes, operators, and communicators by address."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import numpy as np
from nccl.bindings import nccl as api
from numpy.typing import NDArray

from allreduce.comm.calls.call import Call
from allreduce.errors import UnsupportedError
from allreduce.events import logger

_TYPES = {
    "int8": api.DataType.Int8,
    "uint8": api.DataType.Uint8,
    "bool": api.DataType.Uint8,
    "int32": api.DataType.Int32,
    "uint32": api.DataType.Uint32,
    "int64": api.DataType.Int64,
    "uint64": api.DataType.Uint64,
    "float16": api.DataType.Float16,
    "bfloat16": api.DataType.Bfloat16,
    "float32": api.DataType.Float32,
    "float64": api.DataType.Float64,
}
_OPERATORS = {
    "sum": api.RedOp.Sum,
    "mean": api.RedOp.Avg,
    "prod": api.RedOp.Prod,
    "max": api.RedOp.Max,
    "min": api.RedOp.Min,
    # Of bools, which are 0 or 1.
    "logical_and": api.RedOp.Min,
    "logical_or": api.RedOp.Max,
}
_ON_HOST = 1  # ncclScalarHostImmediate: the factor is read during the call
_ID_BYTES = 128
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def dtypes() -> tuple[str, ...]:
    """List the dtypes that NCCL carries."""
    return tuple(_TYPES)


def check_carries(where: str, collective: str, op: str | None, dtype: str) -> None:
    """Refuse what NCCL does not carry.

    Raises:
        UnsupportedError: It does not know the dtype, or the operator on it.
    """
    if dtype not in _TYPES and collective in _REDUCING:
        raise UnsupportedError(
            f"{where}: NCCL does not reduce {dtype}; there are {', '.join(_TYPES)}: cast the array "
            "first"
        )
    logical = op in ("logical_and", "logical_or")
    if op is not None and (op not in _OPERATORS or logical != (dtype == "bool")):
        names = ", ".join(each for each in _OPERATORS if not each.startswith("logical"))
        raise UnsupportedError(
            f"{where}: NCCL has no operator {op} for {dtype}; there are {names}, and logical_and "
            "and logical_or for bool: copy the array to the host for others"
        )


def datatype(call: Call) -> tuple[int, int]:
    """Return NCCL's type for a call's elements, and how many of them an element is.

    What is not added up may be of any type: it goes as bytes.
    """
    if call.dtype in _TYPES:
        return int(_TYPES[call.dtype]), 1
    return int(api.DataType.Uint8), np.dtype(call.dtype).itemsize


def operator(op: str | None) -> int:
    """Return NCCL's operator."""
    return int(_OPERATORS[op or "sum"])


def scaled_sum(handle: Any, dtype: str, factor: float) -> int:
    """Make the operator that multiplies by a factor before it adds up; destroy it after the call.

    Source: NCCL's user guide, ncclRedOpCreatePreMulSum.
    """
    wide = np.dtype(np.float32) if dtype == "bfloat16" else np.dtype(dtype)
    number = np.asarray(factor, wide)
    if dtype == "bfloat16":  # the upper half of a float32, rounded to nearest
        bits = int(number.view(np.uint32))
        number = np.asarray((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, np.uint16)
    return int(
        api.red_op_create_pre_mul_sum(number.ctypes.data, int(_TYPES[dtype]), _ON_HOST, handle)
    )


@cache
def version() -> str:
    """Return the version of libnccl, and log it with the file's path."""
    number = int(api.get_version())
    text = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    logger.info("NCCL %s from %s", text, ", ".join(loaded()) or "a preloaded library")
    if len(loaded()) > 1:
        logger.warning(
            "two NCCL libraries are loaded in this process: %s; keep one, so that all parts of the "
            "program use the same",
            " and ".join(loaded()),
        )
    return text


def loaded() -> list[str]:
    """List the files of the NCCL libraries that this process has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libnccl.so" in line}
    return sorted(os.path.realpath(path) for path in paths)


def unique_id() -> NDArray[np.uint8]:
    """Make the identifier by which members find each other, as bytes."""
    made = api.get_unique_id()
    return np.frombuffer(ctypes.string_at(made.ptr, _ID_BYTES), np.uint8).copy()


def begin(size: int, rank: int, identifier: NDArray[np.uint8]) -> Any:
    """Begin to make one member of a communicator; poll `failure` until it is made.

    Args:
        size: The number of members.
        rank: This one.
        identifier: Of `unique_id`, the same on all members.

    Returns:
        The communicator, as NCCL's bindings have it.
    """
    config = api.Config()
    config.blocking = 0
    identifiers = bytearray(identifier.tobytes())
    return api.comm_init_rank_scalable(size, rank, 1, identifiers, config.ptr)


def status(handle: Any) -> str:
    """Return "" of a communicator that works, "InProgress" of an unfinished call, or an error."""
    found = api.Result(api.comm_get_async_error(handle))
    return "" if found is api.Result.Success else str(found.name)
