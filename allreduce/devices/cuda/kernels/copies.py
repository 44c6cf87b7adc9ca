"""Copies, casts and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

from allreduce.devices.cuda import arrays
from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.driver import ALREADY_ENABLED, api, call, failure
from allreduce.devices.cuda.kernels import layout
from allreduce.devices.cuda.kernels.elementwise import Kernel
from allreduce.devices.cuda.modules import blocks, launch
from allreduce.devices.cuda.streams import current_stream, rehearsal
from allreduce.errors import InternalError
from allreduce.events import logger


def assign(target: Any, value: Any) -> None:
    """Set a contiguous array from another one of a GPU, or from a number."""
    if not target.size:
        return
    if not arrays.contiguous(target):
        raise InternalError(f"no kernel writes to an array with strides {target.strides}")
    if not isinstance(value, arrays.Array):
        set_number(target, value)
    elif arrays.ordinal_of(value) != arrays.ordinal_of(target):
        _assign_across(target, value)
    elif value.dtype != target.dtype:
        layout.cast(target, value)
    elif arrays.contiguous(value) and value.size == target.size:
        _copy_whole(target, value)
    else:
        layout.copy(target, value)


def _copy_whole(target: Any, value: Any) -> None:
    if rehearsal():
        return
    call(
        *(api.cuMemcpyDtoDAsync, pointer(target), pointer(value), target.nbytes),
        current_stream().handle,
    )


def _assign_across(target: Any, value: Any) -> None:
    """Copy between two GPUs, of which the current stream's is one; kernels reach only that one."""
    device = current_stream().device
    source = arrays.ordinal_of(value)
    if arrays.contiguous(value) and (value.dtype, value.size) == (target.dtype, target.size):
        _copy_across(
            pointer(target), arrays.ordinal_of(target), pointer(value), source, value.nbytes
        )
    elif source == device.card.ordinal:
        packed = device.scratch(target.shape, target.dtype)
        assign(packed, value)
        assign(target, packed)
    else:
        first, nbytes = arrays.extent(value)
        here = device.scratch((nbytes,), np.uint8)
        _copy_across(pointer(here), device.card.ordinal, first, source, nbytes)
        assign(target, arrays.like(value, here, pointer(value) - first))


def _copy_across(to: int, target: int, come: int, source: int, nbytes: int) -> None:
    """Copy bytes between two GPUs; the driver goes through the host where it has to."""
    contexts = [_context(target), _context(source)]
    _open_path(*sorted((source, target)))
    if rehearsal():
        return
    call(
        *(api.cuMemcpyPeerAsync, to, contexts[0], come, contexts[1], nbytes),
        current_stream().handle,
    )


@cache
def _context(ordinal: int) -> Any:
    return call(api.cuDevicePrimaryCtxRetain, ordinal)


@cache
def _open_path(first: int, second: int) -> None:
    """Let two GPUs reach each other; without, the driver copies through the host."""
    before = call(api.cuCtxGetCurrent)
    try:
        for own, other in ((first, second), (second, first)):
            if not call(api.cuDeviceCanAccessPeer, own, other):
                logger.info(
                    "GPU %d cannot reach GPU %d: copies between them go through the host",
                    *(own, other),
                )
                return
            call(api.cuCtxSetCurrent, _context(own))
            (status,) = api.cuCtxEnablePeerAccess(_context(other), 0)
            if status and status != ALREADY_ENABLED:  # by CuPy or another library
                raise failure("cuCtxEnablePeerAccess", status)
    finally:
        call(api.cuCtxSetCurrent, before)


def set_number(target: Any, value: Any) -> None:
    """Fill an array with one number."""
    bits = np.asarray(value, target.dtype).tobytes()
    size = target.dtype.itemsize
    if bits == bytes(size):
        if rehearsal():
            return
        call(api.cuMemsetD8Async, pointer(target), 0, target.nbytes, current_stream().handle)
        return
    number = int.from_bytes(bits, "little")
    kinds = {1: "B", 2: "H", 4: "I", 8: "Q"}
    launch(
        *("copy", f"fill_{size}", blocks(target.size), f"P {kinds[size]} q"),
        *(pointer(target), number, target.size),
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
