"""Reductions along axes, in a fixed order: results are the same bits in every run."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels import copies, layout
from allreduce.devices.cuda.kernels.elementwise import Kernel
from allreduce.devices.cuda.kernels.layout import suffix
from allreduce.devices.cuda.modules import BLOCK, blocks, launch
from allreduce.devices.cuda.streams import current_stream
from allreduce.errors import UsageError

_SUMS = ("sum", "mean")
_MOST_ROWS = 1 << 16  # blocks of one launch
_AXIS = "32s"  # struct Axis in kernels/cuda/reduce.cu
# With rows and with columns: the least elements of a segment, and as many results as make a GPU
# busy: 8 blocks, or 512 threads, for each of 128 multiprocessors.
_SEGMENTS = {True: (4096, 1 << 10), False: (32, 1 << 16)}
_LEAST_BYTES = 4  # of numbers that hold a sum of some elements well
_NUMBERS = {"f64": "d", "i64": "q", "i32": "i"}


def reduction(operator: str) -> Kernel:
    """Return the kernel of sum, mean, max or min along axes."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        (x,) = inputs
        axes = attrs["axes"]
        if operator not in _SUMS and not x.size:
            if out.size:
                raise UsageError(f"{operator} over the rows of an empty batch has no value")
            return
        count = prod(x.shape[axis] for axis in axes)
        scale = 1.0 / count if operator == "mean" and count else 1.0
        _reduce("sum_to" if operator in _SUMS else operator, out, x, axes, scale)

    return kernel


def sum_to(_: str) -> Kernel:
    """Return the kernel that adds up along the axes that a broadcast had repeated."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        (x,) = inputs
        leading = x.ndim - out.ndim
        axes = [i for i in range(x.ndim) if i < leading or out.shape[i - leading] == 1]
        _reduce("sum_to", out, x, axes, 1.0)

    return kernel


def _reduce(name: str, out: Any, x: Any, axes: Sequence[int], scale: float) -> None:
    """Reduce along groups of neighbouring axes, the last one first."""
    if not out.size:
        return
    if not x.size:
        copies.set_number(out, 0)
        return
    device = current_stream().device
    x, sizes = layout.in_order(device, x), list(x.shape)
    groups = _groups(axes)
    if not groups:
        copies.assign(out, x.reshape(out.shape))
        return
    for place, (first, last) in enumerate(groups):
        outer, inner = prod(sizes[:first]), prod(sizes[last + 1 :])
        length, is_last = prod(sizes[first : last + 1]), place == len(groups) - 1
        to = out if is_last else device.scratch((outer * inner,), x.dtype)
        _launch(name, to, x, (outer, length, inner), scale if is_last else 1.0)
        sizes[first : last + 1] = [1] * (last + 1 - first)
        x = to


def _groups(axes: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of neighbouring axes (first, last), the last run first."""
    found: list[tuple[int, int]] = []
    for axis in sorted(axes):
        if found and found[-1][1] == axis - 1:
            found[-1] = (found[-1][0], axis)
        else:
            found.append((axis, axis))
    return found[::-1]


def _launch(name: str, out: Any, x: Any, sizes: tuple[int, int, int], scale: float) -> None:
    """Reduce one axis of `(outer, length, inner)`; a long one of few rows in two launches."""
    outer, length, inner = sizes
    segment = _segment(*sizes) if x.dtype.itemsize >= _LEAST_BYTES else length
    segments = -(-length // segment)
    if segments == 1:
        _launch_once(name, out, x, sizes, segment, scale)
        return
    parts = current_stream().device.scratch((outer * segments * inner,), x.dtype)
    _launch_once(name, parts, x, sizes, segment, 1.0)
    _launch_once(name, out, parts, (outer, segments, inner), segments, scale)


def _segment(outer: int, length: int, inner: int) -> int:
    """Choose how many elements of an axis are reduced at first, so that a GPU is busy."""
    least, rows = _SEGMENTS[inner == 1]
    parts = min(length // least, rows // (outer * inner))
    return -(-length // max(1, parts))


def _launch_once(
    name: str, out: Any, x: Any, sizes: tuple[int, int, int], segment: int, scale: float
) -> None:
    outer, length, inner = sizes
    results = outer * -(-length // segment) * inner
    grid = min(results, _MOST_ROWS) if inner == 1 else blocks(results)
    end = suffix(x.dtype)
    number = _NUMBERS.get(end, "f")
    more = [scale if number in "df" else int(scale)] if name == "sum_to" else []
    launch(
        *("reduce", f"{name}_{end}", grid, f"P P {_AXIS}" + f" {number}" * len(more)),
        *(pointer(out), pointer(x), struct.pack("@4q", *sizes, segment), *more),
        block=BLOCK,
    )


def along(operator: str) -> Kernel:
    """Return the kernel of argmax, argmin or cumsum, in which a thread goes along an axis."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        x, axis = layout.in_order(current_stream().device, inputs[0]), attrs["axis"]
        outer, inner = layout.around(x.shape, axis)
        more = [int(attrs["reverse"])] if operator == "cumsum" else []
        launch(
            *("reduce", f"{operator}_{suffix(x.dtype)}", blocks(outer * inner)),
            f"P P q q q{' i' * len(more)}",
            *(pointer(out), pointer(x), outer, x.shape[axis], inner, *more),
        )

    return kernel
