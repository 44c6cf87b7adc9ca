"""Random numbers: the same draws as on CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

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


def deviates(operator: str) -> Kernel:
    """Return the kernel that draws uniform or normal numbers."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        numbers = _evenly(out.dtype, attrs) if operator == "uniform" else _normally(attrs)
        unit = attrs["rows_per_sample"] * prod(out.shape[1:])
        launch(
            *("random", f"{operator}_{suffix(out.dtype)}", blocks(out.size)),
            f"P P P q q{' d' * len(numbers)} Q",
            *(pointer(out), *map(pointer, inputs), unit, out.size, *numbers, attrs["key"]),
        )

    return kernel


def _evenly(dtype: np.dtype[Any], attrs: Mapping[str, Any]) -> list[float]:
    """Return the bounds' lower one and distance, and the largest number to draw."""
    low, high = attrs["low"], attrs["high"]
    least, end = dtype.type(low), dtype.type(high)
    return [low, high - low, float(np.nextafter(end, least) if high > low else end)]


def _normally(attrs: Mapping[str, Any]) -> list[float]:
    return [attrs["mean"], attrs["stddev"]]
