"""Copies, casts and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from allreduce.devices.cuda import arrays
from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.driver import api, call
from allreduce.devices.cuda.kernels import layout
from allreduce.devices.cuda.kernels.elementwise import Kernel
from allreduce.devices.cuda.kernels.layout import STRIDED, strided, suffix
from allreduce.devices.cuda.modules import blocks, launch
from allreduce.devices.cuda.streams import current_stream
from allreduce.errors import InternalError


def assign(target: Any, value: Any) -> None:
    """Set a contiguous array from another one of a GPU, or from a number."""
    if not target.size:
        return
    if not arrays.contiguous(target):
        raise InternalError(f"no kernel writes to an array with strides {target.strides}")
    if not isinstance(value, arrays.Array):
        set_number(target, value)
    elif value.dtype != target.dtype:
        _cast(target, value)
    elif arrays.contiguous(value) and value.size == target.size:
        _copy_whole(target, value)
    else:
        layout.copy(target, value)


def _copy_whole(target: Any, value: Any) -> None:
    stream, here = current_stream(), arrays.ordinal_of(target)
    there = arrays.ordinal_of(value)
    if here == there:
        call(
            *(api.cuMemcpyDtoDAsync, pointer(target), pointer(value), target.nbytes),
            stream.handle,
        )
        return
    contexts = [call(api.cuDevicePrimaryCtxRetain, each) for each in (here, there)]
    call(
        *(api.cuMemcpyPeerAsync, pointer(target), contexts[0], pointer(value), contexts[1]),
        *(target.nbytes, stream.handle),
    )


def set_number(target: Any, value: Any) -> None:
    """Fill an array with one number."""
    bits = np.asarray(value, target.dtype).tobytes()
    size = target.dtype.itemsize
    if bits == bytes(size):
        call(api.cuMemsetD8Async, pointer(target), 0, target.nbytes, current_stream().handle)
        return
    number = int.from_bytes(bits, "little")
    kinds = {1: "B", 2: "H", 4: "I", 8: "Q"}
    launch(
        *("copy", f"fill_{size}", blocks(target.size), f"P {kinds[size]} q"),
        *(pointer(target), number, target.size),
    )


def _cast(out: Any, x: Any) -> None:
    name = f"cast_{suffix(x.dtype)}_{suffix(out.dtype)}"
    launch(
        *("copy", name, blocks(out.size), f"P P q {STRIDED}"),
        *(pointer(out), pointer(x), out.size, strided(out.shape, [x])),
    )


def copy(_: str) -> Kernel:
    """Return the kernel that copies an input, which may broadcast."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        assign(out, inputs[0])

    return kernel


cast = copy


def reshape_copy(_: str) -> Kernel:
    """Return the kernel of a reshape that no view can be."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        assign(out.reshape(inputs[0].shape), inputs[0])

    return kernel


def fill(_: str) -> Kernel:
    """Return the kernel that fills an array with an attribute's number."""

    def kernel(out: Any, _: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        assign(out, attrs["value"])

    return kernel


def size(_: str) -> Kernel:
    """Return the kernel that gives the number of elements along some axes."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        assign(out, prod(inputs[0].shape[axis] for axis in attrs["axes"]))

    return kernel
