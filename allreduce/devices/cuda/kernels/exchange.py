"""Collectives of arrays that lie on one GPU: its logical devices exchange by copies and sums."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels import copies, elementwise
from allreduce.devices.cuda.kernels.layout import suffix
from allreduce.devices.cuda.modules import blocks, launch
from allreduce.devices.cuda.streams import current_stream
from allreduce.errors import UnsupportedError

_INPUTS = 8  # of struct Inputs in kernels/cuda/reduce.cu
_OPERATORS = {
    "prod": "multiply",
    "max": "maximum",
    "min": "minimum",
    "logical_and": "logical_and",
    "logical_or": "logical_or",
}


def exchange(call: Any, factor: float, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Run a collective on the current stream.

    Args:
        call: A `Call`, equal for all members.
        factor: The number that a sum or mean is multiplied by.
        inputs: Each member's; None where it has none.
        outputs: Each member's; None where it gets none.

    Raises:
        UnsupportedError: There is none for arrays on one GPU.
    """
    run = _COLLECTIVES.get(call.collective)
    if run is None:
        raise UnsupportedError(
            f"{call}: logical devices of one GPU have no {call.collective}; give each replica a "
            "GPU of its own, or pass arrays on the host"
        )
    xs = [None if x is None else x.reshape(-1) for x in inputs]
    outs = [None if out is None else out.reshape(-1) for out in outputs]
    run(call, factor, xs, outs)


def _parts(call: Any, members: int) -> list[slice]:
    """Return each member's part of all members' elements."""
    counts = list(call.counts) if call.counts is not None else [call.count] * members
    return [slice(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]


def _reduce(call: Any, factor: float, xs: Sequence[Any], outs: Sequence[Any]) -> None:
    total = _fold(call.op, factor, xs)
    for out in outs:
        if out is not None:
            copies.assign(out, total)


def _reduce_scatter(call: Any, factor: float, xs: Sequence[Any], outs: Sequence[Any]) -> None:
    total = _fold(call.op, factor, xs)
    for out, part in zip(outs, _parts(call, len(xs)), strict=True):
        copies.assign(out, total[part])


def _broadcast(call: Any, _: float, xs: Sequence[Any], outs: Sequence[Any]) -> None:
    for out in outs:
        if out is not None and pointer(out) != pointer(xs[call.root]):
            copies.assign(out, xs[call.root])


def _gather(call: Any, _: float, xs: Sequence[Any], outs: Sequence[Any]) -> None:
    parts = _parts(call, len(xs))
    for out in [each for each in outs if each is not None]:
        for x, part in zip(xs, parts, strict=True):
            if x.size and pointer(out[part]) != pointer(x):
                copies.assign(out[part], x)


def _scatter(call: Any, _: float, xs: Sequence[Any], outs: Sequence[Any]) -> None:
    for out, part in zip(outs, _parts(call, len(xs)), strict=True):
        copies.assign(out, xs[call.root][part])


_COLLECTIVES = {
    "all_reduce": _reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _gather,
    "gather": _gather,
    "scatter": _scatter,
}


def _fold(op: str, factor: float, xs: Sequence[Any]) -> Any:
    """Join arrays element by element, in the members' order."""
    out = current_stream().device.scratch(xs[0].shape, xs[0].dtype)
    if op in ("sum", "mean"):
        _add(out, xs, factor / len(xs) if op == "mean" else factor)
        return out
    copies.assign(out, xs[0])
    make = elementwise.logical if op.startswith("logical") else elementwise.binary
    for x in xs[1:]:
        make(_OPERATORS[op])(out, [out, x], {})
    return out


def _add(out: Any, xs: Sequence[Any], factor: float) -> None:
    if not out.size:
        return
    given, left = list(xs[:_INPUTS]), list(xs[_INPUTS:])
    while True:
        scale = 1.0 if left else factor
        addresses = [*map(pointer, given), *[0] * (_INPUTS - len(given))]
        launch(
            *("reduce", f"sum_of_{suffix(out.dtype)}", blocks(out.size)),
            f"P {8 * _INPUTS}s i d q",
            *(pointer(out), struct.pack(f"@{_INPUTS}Q", *addresses), len(given), scale, out.size),
        )
        if not left:
            return
        given, left = [out, *left[: _INPUTS - 1]], left[_INPUTS - 1 :]
