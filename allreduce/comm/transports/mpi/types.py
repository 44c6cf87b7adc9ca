"""Map dtypes and operators to MPI's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allreduce.comm.calls.call import Array

TYPES = {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "int8": "INT8_T",
    "int16": "INT16_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
    "uint8": "UINT8_T",
    "uint16": "UINT16_T",
    "uint32": "UINT32_T",
    "uint64": "UINT64_T",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
MOVED = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
OPERATORS = {
    "sum": "SUM",
    "mean": "SUM",
    "min": "MIN",
    "max": "MAX",
    "prod": "PROD",
    "logical_and": "LAND",
    "logical_or": "LOR",
    "bitwise_and": "BAND",
    "bitwise_or": "BOR",
    "bitwise_xor": "BXOR",
}
_HALVES = ("float16", "bfloat16")

Range = tuple[int, int]  # (first element, elements)


def wire_dtype(op: str, dtype: str) -> str:
    """Return the type as which MPI reduces a type."""
    if dtype == "bool" or op.startswith("logical"):
        return "uint8"
    return "float32" if dtype in _HALVES else dtype


@dataclass(frozen=True)
class Library:
    """The loaded MPI module, and the largest number of elements per call."""

    mpi: Any
    most: int


def address(array: Array | None) -> int:
    assert array is not None
    place: int = array.ctypes.data
    return place


def cut(shares: Sequence[int]) -> list[Range]:
    """Return each member's (first element, elements)."""
    return list(zip(itertools.accumulate(shares, initial=0), shares, strict=False))
