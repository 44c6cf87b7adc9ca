"""Arrays on a GPU: CuPy's, made as views of memory that this library or another one owns.

Views and their shapes need no CUDA runtime. CuPy's arithmetic does, and is not used here.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cuda.core.utils import StridedMemoryView

from allreduce.devices.cuda.memory import Block
from allreduce.errors import UsageError

Array = cupy.ndarray
ALIGNED = 16  # bytes: the widest access of kernels, and the most that cuBLAS chooses its own by


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


def taken_by(array: Any) -> str:
    """Return the name of the logical device that took an array's memory; "" of others' memory."""
    block = getattr(array.data.mem, "_owner", None) if isinstance(array, Array) else None
    return block.device if isinstance(block, Block) else ""


def contiguous(array: Any) -> bool:
    """Return whether an array's elements lie in order, one after the other."""
    return bool(array.flags.c_contiguous)


def aligned(array: Any) -> bool:
    """Return whether an array begins where that of a rehearsal may."""
    return pointer(array) % ALIGNED == 0


def extent(array: Any) -> tuple[int, int]:
    """Return the address of the first byte that an array's elements lie in, and their number."""
    steps = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    low, high = sum(min(0, each) for each in steps), sum(max(0, each) for each in steps)
    return pointer(array) + low, high - low + int(array.dtype.itemsize)


def like(array: Any, raw: Any, offset: int) -> Any:
    """View flat bytes as an array with the shape and strides of another one.

    Args:
        array: The other one.
        raw: The bytes.
        offset: Of its first element, in bytes.
    """
    return cupy.ndarray(array.shape, array.dtype, raw.data + offset, array.strides)


_ON_GPU = (2, 13)  # kDLCUDA and kDLCUDAManaged, the first half of __dlpack_device__


def borrowed(array: Any) -> int | None:
    """Return the number of the GPU that another library's array lies on; None of the host's."""
    if isinstance(array, cupy.ndarray | np.ndarray | np.generic):
        return None
    if hasattr(type(array), "__dlpack_device__"):
        kind, ordinal = array.__dlpack_device__()
        return int(ordinal) if int(kind) in _ON_GPU else None
    if hasattr(type(array), "__cuda_array_interface__"):
        return int(StridedMemoryView.from_any_interface(array, stream_ptr=-1).device_id)
    return None


def view(array: Any, stream: int) -> Any:
    """Return another library's array as CuPy's; it keeps the original alive.

    Args:
        array: Offers DLPack, which is given our stream, or CUDA's array interface, whose stream
            ours waits for.
        stream: The address of the stream that will use it.
    """
    found = StridedMemoryView.from_any_interface(array, stream_ptr=stream)
    dtype = np.dtype(found.dtype)
    memory = cupy.cuda.UnownedMemory(
        int(found.ptr), found.size * dtype.itemsize, (array, found), int(found.device_id)
    )
    strides = found.strides and tuple(step * dtype.itemsize for step in found.strides)
    start = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(tuple(found.shape), dtype, start, strides or None)


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
    if borrowed(array) == ordinal:
        return adopt(view(array, -1), ordinal)
    raise UsageError(f"a GPU has no memory of type {type(array).__name__}")
