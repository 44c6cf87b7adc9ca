"""Arrays on a GPU: CuPy's, made as views of memory that this library or another one owns.

Views and their shapes need no CUDA runtime. CuPy's arithmetic does, and is not used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import cupy
import numpy as np
from cuda.core.utils import StridedMemoryView

from allreduce.devices.cuda.driver import UNKNOWN, api
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
_FIELDS = ("shape", "typestr", "data", "version")  # that CUDA's array interface requires


def borrowed(array: Any) -> int | None:
    """Return the number of the GPU that another library's array lies on; None of the host's.

    Raises:
        UsageError: It does not say where it lies as its protocol demands.
    """
    if isinstance(array, cupy.ndarray | np.ndarray | np.generic):
        return None
    if hasattr(type(array), "__dlpack_device__"):
        with _explained(array):
            kind, ordinal = array.__dlpack_device__()
        return int(ordinal) if int(kind) in _ON_GPU else None
    if hasattr(type(array), "__cuda_array_interface__"):
        return int(_found(array, -1).device_id)
    return None


def view(array: Any, stream: int, *, written: bool = False) -> Any:
    """Return another library's array as CuPy's; it keeps the original alive.

    Args:
        array: Offers DLPack, which is given our stream, or CUDA's array interface, whose stream
            ours waits for.
        stream: The address of the stream that will use it.
        written: Whether it will be written.

    Raises:
        UsageError: It cannot be used where it is, or is read-only and will be written.
    """
    found = _found(array, stream)
    if written and found.readonly:
        raise UsageError(f"this {type(array).__name__} is read-only; pass a writable array")
    dtype = np.dtype(found.dtype)
    memory = cupy.cuda.UnownedMemory(
        int(found.ptr), found.size * dtype.itemsize, (array, found), int(found.device_id)
    )
    strides = found.strides and tuple(step * dtype.itemsize for step in found.strides)
    start = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(tuple(found.shape), dtype, start, strides or None)


def _found(array: Any, stream: int) -> Any:
    """Ask an array for its place, shape and dtype, and order a stream behind its producer."""
    with _explained(array):
        if not hasattr(type(array), "__dlpack_device__"):
            _check_interface(array.__cuda_array_interface__)
        return StridedMemoryView.from_any_interface(array, stream_ptr=stream)


@contextmanager
def _explained(array: Any) -> Iterator[None]:
    """Raise what another library raises about its array as a UsageError."""
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"a GPU cannot use this {type(array).__name__}: {str(error) or repr(error)}; pass a "
            "CuPy array, or a copy on the host"
        ) from error


def _check_interface(described: Mapping[str, Any]) -> None:
    """Raise BufferError unless an interface is complete, and of a GPU's memory.

    Source: CUDA Array Interface, version 3.
    """
    missing = [name for name in _FIELDS if name not in described]
    if missing:
        raise BufferError(f"its __cuda_array_interface__ lacks {', '.join(missing)}")
    if described["version"] < 3:
        raise BufferError(
            f"its __cuda_array_interface__ has version {described['version']}, but 3 is the first "
            "with a stream"
        )
    if described.get("stream") == 0:
        raise BufferError(
            "its __cuda_array_interface__ has stream 0, which could be either default stream; "
            "expected 1 for the legacy one, 2 for the thread's, None, or an address"
        )
    address = described["data"][0]
    ordinal = api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status = api.cuPointerGetAttribute(ordinal, address)[0] if address else UNKNOWN
    if status == UNKNOWN and prod(described["shape"]):
        raise BufferError(f"its data at {address:#x} does not lie in a GPU's memory")


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
