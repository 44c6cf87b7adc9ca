"""How arrays lie in memory, as kernels are told: dtypes, strides, contiguous copies."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from allreduce.devices.cuda.arrays import contiguous, pointer
from allreduce.devices.cuda.modules import blocks, launch
from allreduce.errors import UnsupportedError

_SUFFIXES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "b8",
}
_RANKS, _INPUTS = 6, 3  # of struct Strided in kernels/cuda/strided.cuh
STRIDED = f"{8 * (1 + _RANKS + _INPUTS * _RANKS)}s"
CONTIGUOUS = bytes(8 * (1 + _RANKS + _INPUTS * _RANKS))


def suffix(dtype: np.dtype[Any]) -> str:
    """Return the end of a kernel's name for a dtype.

    Raises:
        UnsupportedError: No kernel takes it.
    """
    found = _SUFFIXES.get(str(dtype))
    if found is None:
        raise UnsupportedError(f'GPUs have no kernels for {dtype}: use ar.device("CPU:0")')
    return found


def strided(shape: tuple[int, ...], inputs: Sequence[Any]) -> bytes:
    """Describe how inputs that broadcast to a shape are read, as struct Strided."""
    return _strided(shape, tuple((x.shape, x.strides, x.dtype.itemsize) for x in inputs))


@lru_cache(maxsize=4096)
def _strided(
    shape: tuple[int, ...], inputs: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
) -> bytes:
    steps = [_broadcast(shape, *each) for each in inputs]
    sizes, merged = _merge(shape, steps)
    if len(sizes) > _RANKS:
        raise UnsupportedError(
            f"an array of shape {shape} needs {len(sizes)} axes on a GPU, which has kernels for "
            f'{_RANKS}: place this operation on ar.device("CPU:0")'
        )
    whole = _contiguous_steps(sizes)
    if all(each == whole for each in merged):
        return CONTIGUOUS
    rank, gap = len(sizes), [0] * (_RANKS - len(sizes))
    rows = [*sizes, *gap]
    for row in range(_INPUTS):
        rows += [*merged[row], *gap] if row < len(merged) else [0] * _RANKS
    return struct.pack(f"@i4x{len(rows)}q", rank, *rows)


def _broadcast(
    shape: tuple[int, ...], own: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> list[int]:
    """Return an input's step along each axis of the output, in elements."""
    missing = len(shape) - len(own)
    found = [0] * missing
    for size, stride in zip(own, strides, strict=True):
        found.append(0 if size == 1 else stride // itemsize)
    return found


def _merge(shape: tuple[int, ...], steps: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Join neighbouring axes that all inputs pass through evenly, and drop those of size 1."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in steps]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        here = [each[axis] for each in steps]
        if sizes and all(done[-1] == step * size for done, step in zip(merged, here, strict=True)):
            sizes[-1] *= size
            for done, step in zip(merged, here, strict=True):
                done[-1] = step
        else:
            sizes.append(size)
            for done, step in zip(merged, here, strict=True):
                done.append(step)
    return sizes, merged


def _contiguous_steps(sizes: Sequence[int]) -> list[int]:
    return [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def around(shape: tuple[int, ...], axis: int) -> tuple[int, int]:
    """Return how many elements there are before an axis, and after it."""
    return prod(shape[:axis]), prod(shape[axis + 1 :])


def in_order(device: Any, x: Any) -> Any:
    """Return an array, or a contiguous copy of it for the kernel that is about to run."""
    if contiguous(x):
        return x
    whole = device.scratch(x.shape, x.dtype)
    copy(whole, x)
    return whole


def copy(out: Any, x: Any) -> None:
    """Copy an array that broadcasts to `out`'s shape, of its dtype; `out` is contiguous."""
    if out.size:
        launch(
            *("copy", f"copy_{out.dtype.itemsize}", blocks(out.size), f"P P q {STRIDED}"),
            *(pointer(out), pointer(x), out.size, strided(out.shape, [x])),
        )


def cast(out: Any, x: Any) -> None:
    """Convert an array that broadcasts to `out`'s shape to its dtype; `out` is contiguous."""
    if out.size:
        launch(
            *("copy", f"cast_{suffix(x.dtype)}_{suffix(out.dtype)}", blocks(out.size)),
            f"P P q {STRIDED}",
            *(pointer(out), pointer(x), out.size, strided(out.shape, [x])),
        )


def place(out: Any, x: Any) -> None:
    """Copy an array to a view of its shape and dtype, which may have gaps."""
    if out.size:
        launch(
            *("copy", f"place_{out.dtype.itemsize}", blocks(out.size), f"P P q {STRIDED}"),
            *(pointer(out), pointer(x), out.size, strided(out.shape, [x, out])),
        )
