"""Elements by their indices, joined and padded arrays, and a replica's own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels import copies, layout
from allreduce.devices.cuda.kernels.elementwise import Kernel
from allreduce.devices.cuda.kernels.layout import suffix
from allreduce.devices.cuda.modules import blocks, launch
from allreduce.devices.cuda.streams import current_stream

_INDICES = (np.dtype(np.int32), np.dtype(np.int64))


def integers(x: Any) -> Any:
    """Return indices in order, as int32 or int64."""
    device = current_stream().device
    if x.dtype in _INDICES:
        return layout.in_order(device, x)
    wide = device.scratch(x.shape, np.int64)
    copies.assign(wide, x)
    return wide


def take(_: str) -> Kernel:
    """Return the kernel that takes slices of an axis by their indices."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        device, axis = current_stream().device, attrs["axis"]
        x, indices = layout.in_order(device, inputs[0]), integers(inputs[1])
        before, after = layout.around(x.shape, axis)
        name = f"take_{x.itemsize}_{suffix(indices.dtype)}"
        launch(
            *("gather", name, blocks(out.size), "P P P q q q q i P"),
            *(pointer(out), pointer(x), pointer(indices), before, indices.size, x.shape[axis]),
            *(after, int(attrs["wrap"]), device.flaw("index")),
        )

    return kernel


def scatter_add(_: str) -> Kernel:
    """Return the kernel that adds slices at their indices."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if out.size:
            copies.set_number(out, 0)
        dy, indices = inputs
        if not dy.size:
            return
        device, axis, count = current_stream().device, attrs["axis"], indices.size
        dy, indices = layout.in_order(device, dy), integers(indices)
        size, (before, after) = out.shape[axis], layout.around(out.shape, axis)
        chain = device.scratch((2, count), np.int32)
        end = suffix(indices.dtype)
        launch(
            *("gather", f"link_{end}", blocks(count), "P P P q q P"),
            *(pointer(chain), pointer(chain[1]), pointer(indices), count, size),
            device.flaw("index"),
        )
        launch(
            *("gather", f"scatter_add_{suffix(out.dtype)}_{end}", blocks(dy.size)),
            "P P P P P q q q q",
            *(pointer(out), pointer(dy), pointer(indices), pointer(chain), pointer(chain[1])),
            *(before, count, size, after),
        )

    return kernel


def along_axis(operator: str) -> Kernel:
    """Return the kernel of `take_along_axis`, or of its gradient `add_along_axis`."""
    adds = operator == "add_along_axis"

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if adds and out.size:
            copies.set_number(out, 0)
        if not inputs[1].size:
            return
        device, axis = current_stream().device, attrs["axis"]
        x, indices = layout.in_order(device, inputs[0]), integers(inputs[1])
        before, after = layout.around(indices.shape, axis)
        whole = out if adds else x
        kind = suffix(out.dtype) if adds else x.itemsize
        launch(
            *("gather", f"{operator}_{kind}_{suffix(indices.dtype)}"),
            *(blocks(before * after if adds else out.size), "P P P q q q q P"),
            *(pointer(out), pointer(x), pointer(indices), before, indices.shape[axis]),
            *(whole.shape[axis], after, device.flaw("index")),
        )

    return kernel


def one_hot(_: str) -> Kernel:
    """Return the kernel that writes labels as rows of zeros with a one."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        labels = integers(inputs[0])
        name = f"one_hot_{suffix(out.dtype)}_{suffix(labels.dtype)}"
        launch(
            *("gather", name, blocks(out.size), "P P q q P"),
            *(pointer(out), pointer(labels), labels.size, attrs["depth"]),
            current_stream().device.flaw("label"),
        )

    return kernel


def top_k_indices(operator: str) -> Kernel:
    """Return the kernel that finds the largest elements of rows."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        x = layout.in_order(current_stream().device, inputs[0])
        rows, columns = x.size // x.shape[-1], x.shape[-1]
        launch(
            *("gather", f"{operator}_{suffix(x.dtype)}", blocks(rows), "P P q q q"),
            *(pointer(out), pointer(x), rows, columns, attrs["k"]),
        )

    return kernel


def order(operator: str) -> Kernel:
    """Return the kernel that sorts the places of numbers."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        if out.size:
            x = layout.in_order(current_stream().device, inputs[0])
            launch(
                *("gather", f"{operator}_{suffix(x.dtype)}", blocks(x.size), "P P q"),
                *(pointer(out), pointer(x), x.size),
            )

    return kernel


def concatenate(_: str) -> Kernel:
    """Return the kernel that joins arrays along an axis."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        axis, first = attrs["axis"], 0
        for x in inputs:
            part = slice(first, first + x.shape[axis])
            layout.place(out[(slice(None),) * axis + (part,)], x)
            first = part.stop

    return kernel


def pad(_: str) -> Kernel:
    """Return the kernel that surrounds an array with a number."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if out.size:
            copies.set_number(out, attrs["value"])
        x, widths = inputs[0], attrs["widths"]
        pairs = zip(widths, x.shape, strict=True)
        layout.place(out[tuple(slice(before, before + n) for (before, _), n in pairs)], x)

    return kernel


def unslice(_: str) -> Kernel:
    """Return the kernel that puts a part among zeros."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if out.size:
            copies.set_number(out, 0)
        layout.place(out[_running(attrs["index"], out.shape)], inputs[0])

    return kernel


def _running(index: Sequence[Any], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Give parts of named axes, in units of the batch size, their sizes in this run."""
    found = []
    for each, size in zip(index, shape, strict=True):
        if isinstance(each, slice):
            found.append(each)
        else:
            unit = size // each.total
            found.append(slice(each.start * unit, each.stop * unit))
    return tuple(found)


def rows(operator: str) -> Kernel:
    """Return the kernel of a replica's own rows, or of its rows among all replicas'."""
    is_own = operator == "own_rows"

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        x, start = layout.in_order(current_stream().device, inputs[0]), inputs[1]
        first = attrs["shape"][0] if is_own else attrs["rows"]
        unit = getattr(first, "factor", first) * prod(out.shape[1:])
        own = () if is_own else (x.size,)
        launch(
            *("gather", f"{operator}_{out.itemsize}", blocks(out.size)),
            f"P P P q q{' q' * len(own)}",
            *(pointer(out), pointer(x), pointer(start), unit, *own, out.size),
        )

    return kernel
