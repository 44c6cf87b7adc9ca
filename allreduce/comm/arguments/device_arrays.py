"""Check a call whose arrays lie on a device, and make what it needs there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.comm.arguments import messages, scaling
from allreduce.comm.arguments.checks import UNSCALED, Context, Options, check_out
from allreduce.comm.arguments.overlap import check_apart, check_overlap
from allreduce.comm.arguments.prepare import checked_options, describe, result_shape
from allreduce.comm.calls.call import ANY, TO_ROOT, Array, Call
from allreduce.comm.core.transport import PreparedOnDevice
from allreduce.devices import COLLECTIVE, Device, owner
from allreduce.errors import UnsupportedError, UsageError, reworded


def device_of(context: Context, *arrays: Any) -> Device | None:
    """Return the device with memory of its own that arrays lie on; None for the host's."""
    try:
        return next((found for each in arrays if (found := owner(each)) is not None), None)
    except UsageError as error:
        raise reworded(error, f"{context.where}: {error}") from error.__cause__


def prepare(
    context: Context, device: Device, x: Any, options: Options, out: Any, whole: Any = None
) -> PreparedOnDevice:
    """Check a call's arguments; see `arguments.prepare.prepare`.

    Raises:
        UsageError: An array lies elsewhere, or is not contiguous.
    """
    given = out
    x, out = (_own(context, *each, device) for each in (("the array", x), ("out", out)))
    dtype, shape = whole if x is None else (x.dtype, tuple(x.shape))
    options = checked_options(context, x, options, dtype)
    wanted = result_shape(context, shape, options)
    call = describe(context, options, dtype, shape)
    gets = context.collective not in TO_ROOT or context.rank == options.root
    if not gets:
        out = None
    elif out is None:
        nbytes = math.prod(wanted) * dtype.itemsize
        out = device.allocate_result(nbytes).array(dtype, wanted)
    else:
        check_out(f"{context.where}: out", out, wanted, dtype)
        if x is not None:
            check_overlap(context, _place(device, x), _place(device, out), options)
    factor = 1.0 if options.scale is UNSCALED else _product(context, options, dtype)
    answer = given if gets and given is not None else out
    return PreparedOnDevice(call, device, x, out, factor, lambda: answer)


def check_list(context: Context, device: Device, calls: Sequence[PreparedOnDevice]) -> None:
    """Refuse a list's outputs that overlap each other, or the input of another item.

    The device reads and writes all items at the same time.
    """
    pairs = [(each.x, each.out) for each in calls if each.out is not None]
    inputs = [_place(device, x) for x, _ in pairs]
    outputs = [_place(device, out) for _, out in pairs]
    check_apart(context.where, inputs, outputs)
    written = {out.ctypes.data: i for i, out in enumerate(outputs) if out.size}
    for i, x in enumerate(inputs):
        other = written.get(x.ctypes.data, i)
        if x.size and other != i:
            raise UsageError(
                f"{context.where}: item {other} of out is item {i} of the list, which a GPU reads "
                "while it writes; pass another array, or a copy"
            )


class _Interface:
    """Describes where an array lies, as NumPy reads it.

    Args:
        address: In the device's address space.
        array: Contiguous.
    """

    def __init__(self, address: int, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(array.shape),
            "typestr": f"|V{array.dtype.itemsize}",
        }


def _place(device: Device, array: Any) -> Array:
    """Return an array that can be compared with others by its place, but must not be read."""
    return np.asarray(_Interface(device.address(array), array))


def prepare_message(
    context: Context, device: Device, array: Any, peer: Any, tag: Any
) -> PreparedOnDevice:
    """Check the arguments of a send or recv.

    Raises:
        UnsupportedError: A recv leaves the source open, or a tag is given.
    """
    sends = context.collective == "send"
    own = _own(context, "the array" if sends else "out", array, device)
    if tag not in (0, ANY) or (not sends and peer == ANY):
        raise UnsupportedError(
            f"{context.where}: NCCL matches messages by their order alone; "
            f"{'' if sends else 'name source= and '}leave tag= out, or copy the array to the host"
        )
    root = messages.check_peer(context, "dest" if sends else "source", peer)
    if root == context.rank:
        raise UnsupportedError(
            f"{context.where}: NCCL carries no message from a member to itself; copy the array "
            "where you need it"
        )
    call = Call(context.collective, None, str(own.dtype), int(own.size), root, context.group, tag=0)
    x, out = (own, None) if sends else (None, own)
    answer = None if sends else array
    return PreparedOnDevice(call, device, x, out, 1.0, lambda: answer)


def _own(context: Context, name: str, array: Any, device: Device) -> Any:
    """Return an array as one of the device's own, without a copy; "out" will be written."""
    if array is None:
        return None
    if not (device.holds(array) or device.borrows(array)):
        where = owner(array)
        whose = "the host" if where is None else where.name.local
        raise UsageError(
            f"{context.where}: {name} lies in {whose}'s memory, but the call's other array on "
            f"{device.name.local}; copy one of them, so that both lie on one device"
        )
    try:
        found = device.view(array, device.own(COLLECTIVE), written=name == "out")
    except UsageError as error:
        raise reworded(error, f"{context.where}: {name}: {error}") from error.__cause__
    if not found.flags.c_contiguous:
        raise UsageError(
            f"{context.where}: {name}, of shape {found.shape} with strides {found.strides}, is not "
            "contiguous; pass a contiguous copy"
        )
    return found


def _product(context: Context, options: Options, dtype: np.dtype[Any]) -> float:
    """Multiply the factors before and after: a sum may take both at once."""
    before, after = scaling.check_factors(context, options.scale, options.op, dtype)
    if isinstance(before, complex) or isinstance(after, complex):
        raise UsageError(f"{context.where}: factors of arrays on GPUs are real")
    return float(before * after)
