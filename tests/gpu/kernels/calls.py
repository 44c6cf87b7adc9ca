"""Run kernels of kernels/cuda on NumPy arrays, as the library launches them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, Program, ProgramOptions

from tests.gpu import launch

SOURCES = launch.ROOT / "kernels" / "cuda"
SUFFIXES = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64, "b8": np.bool_}


def call(result: tuple[Any, ...]) -> Any:
    """Return the value of a call to the driver, which must succeed."""
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
    return result[1] if len(result) > 1 else None


@cache
def module(source: str) -> Any:
    """Compile and load a file; the device's context becomes current."""
    device = Device(0)
    device.set_current()
    headers = [str(SOURCES), str(launch.include("cuda_runtime"))]
    options = ProgramOptions(arch=f"sm_{device.arch}", std="c++17", include_path=headers)
    text = (SOURCES / f"{source}.cu").read_text()
    code = Program(text, "c++", options).compile("cubin").code
    return call(driver.cuModuleLoadData(code))


def run(
    source: str, name: str, *arguments: Any, grid: int = 3, block: int = 256, skip: int = 0
) -> None:
    """Launch a kernel and wait for it.

    Args:
        source: The file in kernels/cuda, without its ending.
        name: The kernel's.
        arguments: Arrays, which are copied to the device and back; NumPy scalars; bytes of a
            struct; None for a null pointer.
        grid: Blocks.
        block: Threads in a block.
        skip: Elements by which arrays are misaligned.
    """
    function = call(driver.cuModuleGetFunction(module(source), name.encode()))
    places: list[tuple[np.ndarray, int, int]] = []
    packed: list[bytes] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            memory = int(
                call(driver.cuMemAlloc(max(1, argument.nbytes + skip * argument.itemsize)))
            )
            at = memory + skip * argument.itemsize
            if argument.nbytes:
                call(driver.cuMemcpyHtoD(at, argument.ctypes.data, argument.nbytes))
            places.append((argument, memory, at))
            packed.append(np.uint64(at).tobytes())
        elif argument is None:
            packed.append(bytes(8))
        else:
            packed.append(argument if isinstance(argument, bytes) else argument.tobytes())
    held = [ctypes.create_string_buffer(each, len(each)) for each in packed]
    pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
    where = ctypes.addressof(pointers)
    call(driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, 0, where, 0))
    call(driver.cuCtxSynchronize())
    for array, memory, at in places:
        if array.nbytes:
            call(driver.cuMemcpyDtoH(array.ctypes.data, at, array.nbytes))
        call(driver.cuMemFree(memory))


def struct_of(rank: int, sizes: list[int], strides: list[list[int]]) -> bytes:
    """Pack struct Strided of strided.cuh."""
    out = np.zeros(25, np.int64)
    out[0] = rank
    out[1 : 1 + len(sizes)] = sizes
    for row, steps in enumerate(strides):
        out[7 + 6 * row : 7 + 6 * row + len(steps)] = steps
    return out.tobytes()


CONTIGUOUS = struct_of(0, [], [])
