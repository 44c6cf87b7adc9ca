"""What NCCL carries: dtypes and operators. Imports nothing of NCCL."""

from __future__ import annotations

from allreduce.comm.calls.call import REDUCING
from allreduce.errors import UnsupportedError

# The names of `ncclDataType_t` and `ncclRedOp_t` in NCCL's bindings.
TYPES = {
    "int8": "Int8",
    "uint8": "Uint8",
    "bool": "Uint8",
    "int32": "Int32",
    "uint32": "Uint32",
    "int64": "Int64",
    "uint64": "Uint64",
    "float16": "Float16",
    "bfloat16": "Bfloat16",
    "float32": "Float32",
    "float64": "Float64",
}
OPERATORS = {
    "sum": "Sum",
    "mean": "Avg",
    "prod": "Prod",
    "max": "Max",
    "min": "Min",
    # Of bools, which are 0 or 1.
    "logical_and": "Min",
    "logical_or": "Max",
}


def check_carries(where: str, collective: str, op: str | None, dtype: str) -> None:
    """Refuse what NCCL does not carry.

    Raises:
        UnsupportedError: It does not know the dtype, or the operator on it.
    """
    if dtype not in TYPES and collective in REDUCING:
        raise UnsupportedError(
            f"{where}: NCCL does not reduce {dtype}; there are {', '.join(TYPES)}: cast the array "
            "first"
        )
    logical = op in ("logical_and", "logical_or")
    if op is not None and (op not in OPERATORS or logical != (dtype == "bool")):
        names = ", ".join(each for each in OPERATORS if not each.startswith("logical"))
        raise UnsupportedError(
            f"{where}: NCCL has no operator {op} for {dtype}; there are {names}, and logical_and "
            "and logical_or for bool: copy the array to the host for others"
        )
