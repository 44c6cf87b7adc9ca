"""Element-wise operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels import layout
from allreduce.devices.cuda.kernels.layout import STRIDED, strided, suffix
from allreduce.devices.cuda.modules import blocks, launch
from allreduce.devices.cuda.streams import current_stream

Kernel = Callable[[Any, Sequence[Any], Mapping[str, Any]], None]
_POINTERS = {1: "P P", 2: "P P P", 3: "P P P P"}
_CTYPES = {"f32": "f", "f64": "d", "i32": "i", "i64": "q"}


def _run(name: str, out: Any, inputs: Sequence[Any]) -> None:
    if out.size:
        launch(
            *("elementwise", name, blocks(out.size), f"{_POINTERS[len(inputs)]} q {STRIDED}"),
            *(pointer(out), *map(pointer, inputs), out.size, strided(out.shape, inputs)),
        )


def unary(operator: str) -> Kernel:
    """Return the kernel of a function of one operand, of its dtype."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        _run(f"{operator}_{suffix(out.dtype)}", out, inputs)

    return kernel


binary = unary


def compare(operator: str) -> Kernel:
    """Return the kernel of a comparison, which gives bools."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        _run(f"{operator}_{suffix(inputs[0].dtype)}", out, inputs)

    return kernel


where = unary


def logical(operator: str) -> Kernel:
    """Return the kernel of a function of truth values; numbers are true unless they are 0."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        _run(f"{operator}_b8", out, [_truth(x) for x in inputs])

    return kernel


def _truth(x: Any) -> Any:
    if x.dtype == bool:
        return x
    found = current_stream().device.scratch(x.shape, bool)
    layout.cast(found, x)
    return found


def clip(operator: str) -> Kernel:
    """Return the kernel that limits values to two numbers."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        end = suffix(out.dtype)
        number = _CTYPES[end]
        low, high = (out.dtype.type(attrs[each]).item() for each in ("low", "high"))
        if out.size:
            launch(
                *("elementwise", f"{operator}_{end}", blocks(out.size)),
                f"P P {number} {number} q {STRIDED}",
                *(pointer(out), pointer(inputs[0]), low, high, out.size),
                strided(out.shape, inputs),
            )

    return kernel
