"""Check a call whose arrays lie on a device, and make what it needs there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm.arguments import scaling
from allreduce.comm.arguments.checks import UNSCALED, Context, Options
from allreduce.comm.arguments.prepare import checked_options, describe, result_shape
from allreduce.comm.calls.call import Call
from allreduce.devices import Device, owner
from allreduce.errors import ShapeError, UsageError

_TO_ROOT = ("reduce", "gather")


@dataclass(frozen=True)
class PreparedOnDevice:
    """A checked call of a device's arrays.

    Attributes:
        call: The call.
        device: The device of the arrays.
        x: The input, contiguous; None on members that only receive.
        out: The output; None on members that get no result.
        factor: What a sum or mean is multiplied by.
        result: What the caller gets.
    """

    call: Call
    device: Device
    x: Any
    out: Any
    factor: float
    result: Callable[[], Any]


def device_of(*arrays: Any) -> Device | None:
    """Return the device with memory of its own that arrays lie on; None for the host's."""
    return next((found for each in arrays if (found := owner(each)) is not None), None)


def prepare(
    context: Context, device: Device, x: Any, options: Options, out: Any, whole: Any = None
) -> PreparedOnDevice:
    """Check a call's arguments; see `arguments.prepare.prepare`.

    Raises:
        UsageError: An array lies elsewhere, or is not contiguous.
    """
    for name, array in (("the array", x), ("out", out)):
        if array is not None:
            _check(context, name, array, device)
    dtype, shape = whole if x is None else (x.dtype, tuple(x.shape))
    options = checked_options(context, x, options, dtype)
    wanted = result_shape(context, shape, options)
    call = describe(context, options, dtype, shape)
    gets = context.collective not in _TO_ROOT or context.rank == options.root
    if not gets:
        out = None
    elif out is None:
        nbytes = math.prod(wanted) * dtype.itemsize
        out = device.allocate(nbytes, zero=False).array(dtype, wanted)
    elif (tuple(out.shape), out.dtype) != (wanted, dtype):
        raise ShapeError(
            f"{context.where}: out must have shape {wanted} and dtype {dtype}, but has "
            f"{tuple(out.shape)} and {out.dtype}"
        )
    factor = 1.0 if options.scale is UNSCALED else _product(context, options, dtype)
    target = out
    return PreparedOnDevice(call, device, x, out, factor, lambda: target)


def _check(context: Context, name: str, array: Any, device: Device) -> None:
    if not device.holds(array):
        where = owner(array)
        place = "the host's memory" if where is None else f"{where.name.local}'s"
        raise UsageError(
            f"{context.where}: {name} lies in {place}, but the call's other array on "
            f"{device.name.local}; copy one of them, so that both lie on one device"
        )
    if not array.flags.c_contiguous:
        raise UsageError(
            f"{context.where}: {name}, of shape {array.shape} with strides {array.strides}, is not "
            "contiguous; pass a contiguous copy"
        )


def _product(context: Context, options: Options, dtype: np.dtype[Any]) -> float:
    """Multiply the factors before and after: a sum may take both at once."""
    before, after = scaling.check_factors(context, options.scale, options.op, dtype)
    if isinstance(before, complex) or isinstance(after, complex):
        raise UsageError(f"{context.where}: factors of arrays on GPUs are real")
    return float(before * after)
