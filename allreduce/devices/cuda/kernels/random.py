"""Dropout: the same draws as on CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels import layout
from allreduce.devices.cuda.kernels.elementwise import Kernel
from allreduce.devices.cuda.kernels.layout import suffix
from allreduce.devices.cuda.modules import blocks, launch
from allreduce.devices.cuda.streams import current_stream


def dropout(_: str) -> Kernel:
    """Return the kernel of dropout."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        x, row_offset, step = inputs
        if not out.size:
            return
        x = layout.in_order(current_stream().device, x)
        rows = x.shape[0] if x.ndim else 1
        launch(
            *("random", f"dropout_{suffix(out.dtype)}", blocks(out.size), "P P P P q q q d Q"),
            *(pointer(out), pointer(x), pointer(row_offset), pointer(step)),
            *(attrs["rows_per_sample"], rows, out.size // rows),
            *(float(attrs["rate"]), attrs["key"]),
        )

    return kernel
