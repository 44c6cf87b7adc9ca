"""Softmax and cross-entropy, a row of classes at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels import layout
from allreduce.devices.cuda.kernels.elementwise import Kernel
from allreduce.devices.cuda.kernels.gather import integers
from allreduce.devices.cuda.kernels.layout import suffix
from allreduce.devices.cuda.modules import launch
from allreduce.devices.cuda.streams import current_stream

_THREADS = 128
_MOST_ROWS = 65535
_NAMES = {
    "sparse_softmax_cross_entropy": "sparse_cross_entropy",
    "sparse_softmax_cross_entropy_gradient": "sparse_cross_entropy_gradient",
    "softmax_cross_entropy": "cross_entropy",
    "softmax_cross_entropy_gradient": "cross_entropy_gradient",
}


def _run(name: str, out: Any, inputs: Sequence[Any], shape: tuple[int, ...], *more: int) -> None:
    columns = shape[-1]
    if not out.size or not columns:
        return
    rows = prod(shape[:-1])
    pointers = "P " * (1 + len(inputs))
    launch(
        *("loss", name, min(rows, _MOST_ROWS), f"{pointers}q q{' P' * len(more)}"),
        *(pointer(out), *map(pointer, inputs), rows, columns, *more),
        block=_THREADS,
    )


def softmax(operator: str) -> Kernel:
    """Return the kernel of softmax or log_softmax along the last axis."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        x = layout.in_order(current_stream().device, inputs[0])
        _run(f"{operator}_{suffix(out.dtype)}", out, [x], x.shape)

    return kernel


def loss(operator: str) -> Kernel:
    """Return the kernel of a cross-entropy with targets for each class, or of its gradient."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        device = current_stream().device
        plain = [layout.in_order(device, x) for x in inputs]
        _run(f"{_NAMES[operator]}_{suffix(out.dtype)}", out, plain, inputs[-1].shape)

    return kernel


def sparse_loss(operator: str) -> Kernel:
    """Return the kernel of a cross-entropy with one label per row, or of its gradient."""

    def kernel(out: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> None:
        device = current_stream().device
        *others, labels, logits = inputs
        plain = [layout.in_order(device, x) for x in (*others, logits)]
        plain.insert(-1, integers(labels))
        name = f"{_NAMES[operator]}_{suffix(out.dtype)}_{suffix(plain[-2].dtype)}"
        _run(name, out, plain, logits.shape, device.flaw("label"))

    return kernel
