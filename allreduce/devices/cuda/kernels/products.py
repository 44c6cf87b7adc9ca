"""Matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from allreduce.devices.cuda import blas
from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels import copies, layout
from allreduce.devices.cuda.kernels.elementwise import Kernel
from allreduce.devices.cuda.streams import current_stream
from allreduce.errors import UnsupportedError


def matmul(_: str) -> Kernel:
    """Return the kernel of products of matrices, or of batches of them."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if out.dtype.kind != "f":
            raise UnsupportedError(
                f'a product of {out.dtype} has no GPU kernel: cast it, or use ar.device("CPU:0")'
            )
        a, b = inputs
        if not out.size:
            return
        if not a.shape[-1]:
            copies.set_number(out, 0)
            return
        _product(out, a, b, attrs.get("short", False))

    return kernel


def _product(out: Any, a: Any, b: Any, short: bool) -> None:
    """Compute row-major `out = a b`, which is column-major `outᵀ = bᵀ aᵀ`."""
    (n, k), m = a.shape[-2:], b.shape[-1]
    leading = out.shape[:-2]
    batch = prod(leading)
    left, lda, across_a, step_a = _operand(a, leading)
    right, ldb, across_b, step_b = _operand(b, leading)
    operands = (
        blas.Operand(right, ldb, step_b),
        blas.Operand(left, lda, step_a),
        blas.Operand(pointer(out), m, n * m),
    )
    blas.handle_of(current_stream()).multiply(
        blas.Product(str(out.dtype), (across_b, across_a), (m, n, k), operands, batch, short=short)
    )


def _operand(x: Any, leading: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return address, leading dimension, transposition and step of an operand.

    One that lies otherwise than cuBLAS reads it is copied first.
    """
    found = _as_is(x, leading)
    if found is None:
        whole = current_stream().device.scratch((*leading, *x.shape[-2:]), x.dtype)
        layout.copy(whole, x)
        found = _as_is(whole, leading)
        assert found is not None, "it is contiguous"
    return found


def _as_is(x: Any, leading: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    step = _step(x, leading)
    rows, columns = x.shape[-2:]
    down, along = (stride // x.itemsize for stride in x.strides[-2:])
    if step is None:
        return None
    if (along == 1 or columns == 1) and (down >= columns or rows == 1):
        return pointer(x), max(down if rows > 1 else columns, 1), blas.NORMAL, step
    if (down == 1 or rows == 1) and (along >= rows or columns == 1):
        return pointer(x), max(along if columns > 1 else rows, 1), blas.TRANSPOSED, step
    return None


def _step(x: Any, leading: tuple[int, ...]) -> int | None:
    """Return the one step between the matrices of a batch, in elements, if there is one."""
    own = x.shape[:-2]
    if prod(own) == 1:
        return 0
    if own != leading:
        return None
    step = expected = 0
    for size, stride in zip(reversed(own), reversed(x.strides[:-2]), strict=True):
        if size == 1:
            continue
        if not step:
            step = expected = stride // x.itemsize
        elif stride // x.itemsize != expected:
            return None
        expected *= size
    return step or None
