"""NCCL as it is called: dtypes, operators, and communicators by address."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from typing import Any

import numpy as np
from nccl.bindings import nccl as api
from numpy.typing import NDArray

from allreduce.comm.calls.call import Call
from allreduce.comm.transports.nccl.carries import OPERATORS, TYPES
from allreduce.errors import InternalError, UnsupportedError
from allreduce.events import logger

_ON_HOST = 1  # ncclScalarHostImmediate: the factor is read during the call
_ID_BYTES = 128

# The calls of NCCL's bindings that this package makes. The youngest, ncclCommInitRankConfig, came
# with NCCL 2.14. The bindings load older libraries, too, and fail at the first call of what is
# missing.
CALLS = (
    *("get_version", "get_unique_id", "get_last_error", "group_start", "group_end"),
    *("comm_init_rank_config", "comm_get_async_error"),
    *("comm_abort", "comm_finalize", "comm_destroy"),
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv"),
    *("red_op_create_pre_mul_sum", "red_op_destroy"),
)
_OLDEST = "2.14"
_naming = threading.Lock()
_SHARED_MEMORY = "/dev/shm"
_LEAST_SHARED = 256 << 20  # bytes; NCCL's guide advises containers to have 1 GiB


def datatype(call: Call) -> tuple[int, int]:
    """Return NCCL's type for a call's elements, and how many of them an element is.

    What is not added up may be of any type: it goes as bytes.
    """
    if call.dtype in TYPES:
        return _type(call.dtype), 1
    return int(api.DataType.Uint8), np.dtype(call.dtype).itemsize


def operator(op: str | None) -> int:
    """Return NCCL's operator."""
    return int(getattr(api.RedOp, OPERATORS[op or "sum"]))


def _type(dtype: str) -> int:
    return int(getattr(api.DataType, TYPES[dtype]))


def scaled_sum(handle: Any, dtype: str, factor: float) -> int:
    """Make the operator that multiplies by a factor before it adds up; destroy it after the call.

    Source: NCCL's user guide, ncclRedOpCreatePreMulSum.
    """
    wide = np.dtype(np.float32) if dtype == "bfloat16" else np.dtype(dtype)
    number = np.asarray(factor, wide)
    if dtype == "bfloat16":  # the upper half of a float32, rounded to nearest
        bits = int(number.view(np.uint32))
        number = np.asarray((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, np.uint16)
    return int(api.red_op_create_pre_mul_sum(number.ctypes.data, _type(dtype), _ON_HOST, handle))


def version() -> str:
    """Return the version of libnccl; the first call logs it with the file's path.

    Raises:
        UnsupportedError: It lacks a call that this package makes.
    """
    with _naming:  # several replicas may ask at once
        return _version()


@cache
def _version() -> str:
    number = int(api.get_version())
    text = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    path = _bound()
    if lacking := _lacking(path):
        raise UnsupportedError(
            f"NCCL {text} has no {', '.join(lacking)}; expected NCCL {_OLDEST} or later, as in the "
            f"package nvidia-nccl-cu12; found {path}"
        )
    logger.info("NCCL %s from %s", text, path)
    if len(loaded()) > 1:
        logger.warning(
            "two NCCL libraries are loaded in this process: %s; keep one, so that all parts of the "
            "program use the same",
            " and ".join(loaded()),
        )
    return text


def _bound() -> str:
    """Return the file of the library that the bindings call, which may be one of several.

    They take functions that are visible to the whole process, if there are any.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "ncclGetVersion"):
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    address = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value or 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(each, 16) for each in line.split()[0].split("-"))
            if first <= address < last:
                return os.path.realpath(line.split()[-1])
    raise InternalError(f"the address of ncclGetVersion, {address:#x}, lies in no file")


def _lacking(path: str) -> list[str]:
    """List the C functions that a loaded library lacks; the bindings may take these of another."""
    names = ["nccl" + name.title().replace("_", "") for name in CALLS]
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    return [name for name in names if not hasattr(library, name)]


def loaded() -> list[str]:
    """List the files of the NCCL libraries that this process has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libnccl.so" in line}
    return sorted(os.path.realpath(path) for path in paths)


def unique_id(where: str) -> NDArray[np.uint8]:
    """Make the identifier by which members find each other, as bytes.

    Args:
        where: A prefix for messages.

    Raises:
        InternalError: NCCL finds no way to the other members.
    """
    try:
        made = api.get_unique_id()
    except api.NCCLError as error:
        raise InternalError(
            f"{where}: NCCL could not make a unique id: {error}; NCCL_SOCKET_IFNAME chooses the "
            "network interface, and NCCL_DEBUG=INFO shows which ones there are"
        ) from None
    return np.frombuffer(ctypes.string_at(made.ptr, _ID_BYTES), np.uint8).copy()


def begin(size: int, rank: int, identifier: NDArray[np.uint8]) -> Any:
    """Begin to make one member of a communicator; poll `status` until it is made.

    Args:
        size: The number of members.
        rank: This one.
        identifier: Of `unique_id`, the same on all members.

    Returns:
        The communicator, as NCCL's bindings have it.
    """
    config = api.Config()
    config.blocking = 0
    there = identifier.ctypes.data
    return api.comm_init_rank_config(size, there, rank, config.ptr)


def advice() -> str:
    """Say what may keep members from connecting: shared memory that is too small, for one."""
    place = os.statvfs(_SHARED_MEMORY) if os.path.isdir(_SHARED_MEMORY) else None
    left = None if place is None else place.f_bavail * place.f_frsize
    if left is not None and left < _LEAST_SHARED:
        return (
            f"{_SHARED_MEMORY} has only {left >> 20} MiB left, and NCCL needs some for each pair "
            "of members: start the container with --shm-size=1g, or set NCCL_SHM_DISABLE=1"
        )
    return "NCCL_DEBUG=INFO shows why"


def status(handle: Any) -> str:
    """Return "" of a communicator that works, "InProgress" of an unfinished call, or an error."""
    found = api.Result(api.comm_get_async_error(handle))
    return "" if found is api.Result.Success else str(found.name)
