"""Normalisation to mean 0 and variance 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels import layout
from allreduce.devices.cuda.kernels.elementwise import Kernel
from allreduce.devices.cuda.kernels.layout import suffix
from allreduce.devices.cuda.modules import launch
from allreduce.devices.cuda.streams import current_stream

_MOST_GROUPS = 65535


def normalize(operator: str) -> Kernel:
    """Return the kernel that normalizes along axes, or of its gradient."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        device, axes = current_stream().device, sorted(attrs["axes"])
        if axes and axes[-1] - axes[0] + 1 == len(axes):
            _run(operator, out, [layout.in_order(device, x) for x in inputs], axes, attrs)
            return
        # Apart from each other: moved to the end, and back.
        others = [axis for axis in range(out.ndim) if axis not in axes]
        turned = out.transpose(others + axes)
        plain = [layout.in_order(device, x.transpose(others + axes)) for x in inputs]
        result = device.scratch(turned.shape, out.dtype)
        _run(operator, result, plain, list(range(len(others), out.ndim)), attrs)
        layout.place(turned, result)

    return kernel


def _run(
    operator: str, out: Any, inputs: Sequence[Any], axes: Sequence[int], attrs: Mapping[str, Any]
) -> None:
    shape = out.shape
    first, last = (axes[0], axes[-1]) if axes else (len(shape), len(shape) - 1)
    outer, inner = prod(shape[:first]), prod(shape[last + 1 :])
    launch(
        *("normalize", f"{operator}_{suffix(out.dtype)}", min(outer * inner, _MOST_GROUPS)),
        f"{'P ' * (1 + len(inputs))}q q q d",
        *(pointer(out), *map(pointer, inputs), outer, prod(shape[first : last + 1]), inner),
        attrs["epsilon"],
    )
