"""Arrays on a GPU: CuPy's, made as views of memory that this library or another one owns.

Views and their shapes need no CUDA runtime. CuPy's arithmetic does, and is not used here.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from allreduce.errors import UsageError

Array = cupy.ndarray


def flat_view(address: int, nbytes: int, owner: object, ordinal: int) -> Any:
    """Return memory as a flat array of uint8, which keeps `owner` alive.

    Args:
        address: In the device's address space.
        nbytes: The size.
        owner: Whatever the memory belongs to.
        ordinal: The device's number in CUDA.
    """
    memory = cupy.cuda.UnownedMemory(address, nbytes, owner, ordinal)
    return cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))


def pointer(array: Any) -> int:
    """Return the address of an array's first element."""
    return int(array.data.ptr)


def ordinal_of(array: Any) -> int:
    """Return the number of the device that an array lies on."""
    return int(array.data.device_id)


def contiguous(array: Any) -> bool:
    """Return whether an array's elements lie in order, one after the other."""
    return bool(array.flags.c_contiguous)


def adopt(array: Any, ordinal: int) -> Any:
    """Return the flat bytes of an array of CuPy, or of a library that offers DLPack.

    Raises:
        UsageError: It lies elsewhere, or is not one piece of memory.
    """
    if isinstance(array, cupy.ndarray):
        if ordinal_of(array) != ordinal:
            raise UsageError(
                f"this cupy.ndarray lies on GPU {ordinal_of(array)}; expected GPU {ordinal}: copy "
                "it there first"
            )
        if not contiguous(array):
            raise UsageError(
                f"a cupy.ndarray of shape {array.shape} is not one piece of memory (strides "
                f"{array.strides} bytes); pass cupy.ascontiguousarray(...) of it"
            )
        return array.reshape(-1).view(np.uint8)
    raise UsageError(f"a GPU has no memory of type {type(array).__name__}")
