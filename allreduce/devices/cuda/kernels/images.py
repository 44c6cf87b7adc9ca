"""Convolution and pooling of images, channels last.

A convolution copies the pixels of the windows into columns, some images at a time, and multiplies
them with its kernel; a kernel of 1×1 multiplies the images themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from allreduce.devices.cuda import blas
from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels import copies, layout
from allreduce.devices.cuda.kernels.elementwise import Kernel
from allreduce.devices.cuda.kernels.layout import suffix
from allreduce.devices.cuda.modules import blocks, launch
from allreduce.devices.cuda.streams import current_stream

_WINDOWS = "80s"  # struct Windows in kernels/cuda/images.cu
_MOST_COLUMNS = 64 << 20  # bytes made at a time; with products this large a GPU is busy


def _windows(windows: Any, images: tuple[int, ...], count: tuple[int, int]) -> bytes:
    """Describe windows on `(batch, height, width, channels)`, as struct Windows."""
    return struct.pack("@6q8i", *images, *count, *windows.numbers[:8])


@dataclass(frozen=True)
class _Columns:
    """The windows' pixels as rows of a matrix, `(windows, groups, taps * channels / groups)`."""

    windows: Any
    groups: int
    short: bool  # operands are rounded to bfloat16
    image: tuple[int, ...]  # height, width, channels
    count: tuple[int, int]  # of windows

    @property
    def width(self) -> int:
        """The columns of one group."""
        taps: int = prod(self.windows.size)
        return taps * self.image[2] // self.groups

    @property
    def is_image(self) -> bool:
        """Whether images are these columns already."""
        each = self.windows
        return prod(each.size) == prod(each.strides) == 1 and not each.is_padded

    def pieces(self, images: int, itemsize: int) -> Iterator[slice]:
        """Cut a batch into pieces whose columns are made at a time."""
        size = self.images_at_a_time(itemsize)
        return (slice(first, min(first + size, images)) for first in range(0, images, size))

    def images_at_a_time(self, itemsize: int) -> int:
        one = prod(self.count) * self.groups * self.width * itemsize
        return max(1, _MOST_COLUMNS // one)

    def memory(self, images: int, dtype: Any) -> Any:
        """Return memory for the columns of a piece."""
        most = min(images, self.images_at_a_time(dtype.itemsize))
        shape = (most * prod(self.count), self.groups * self.width)
        return current_stream().device.scratch(shape, dtype)

    def unfold(self, out: Any, x: Any) -> Any:
        """Fill columns from images; returns those columns."""
        if self.is_image:
            return x
        size = len(x) * prod(self.count) * self.groups * self.width
        launch(
            *("images", f"unfold_{x.itemsize}", blocks(size), f"P P i {_WINDOWS}"),
            *(pointer(out), pointer(x), self.groups, _windows(self.windows, x.shape, self.count)),
        )
        return out

    def fold(self, out: Any, columns: Any) -> None:
        """Add up columns at the pixels that they come from."""
        launch(
            *("images", f"fold_{suffix(out.dtype)}", blocks(out.size), f"P P i {_WINDOWS}"),
            *(pointer(out), pointer(columns), self.groups),
            _windows(self.windows, out.shape, self.count),
        )

    def multiply(
        self,
        dtype: Any,
        out: _Matrix,
        a: _Matrix,
        b: _Matrix,
        sizes: tuple[int, int, int],
        adds: bool = False,
    ) -> None:
        """Compute row-major `out (n, m) = a (n, k) b (k, m)`, or add it; sizes are (n, k, m)."""
        n, k, m = sizes
        operands = tuple(blas.Operand(each.address, each.leading) for each in (b, a, out))
        blas.handle_of(current_stream()).multiply(
            blas.Product(
                *(str(dtype), (b.transposed, a.transposed), (m, n, k)),
                operands=(operands[0], operands[1], operands[2]),
                adds=adds,
                short=self.short,
            )
        )


@dataclass(frozen=True)
class _Matrix:
    """One group's part of a matrix in row-major order."""

    address: int
    leading: int  # elements from row to row
    transposed: int = blas.NORMAL


def _matrix(array: Any, columns: int, group: int, groups: int, how: int = blas.NORMAL) -> _Matrix:
    return _Matrix(pointer(array) + group * (columns // groups) * array.itemsize, columns, how)


def conv2d(_: str) -> Kernel:
    """Return the kernel of a convolution."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        device, groups = current_stream().device, attrs["groups"]
        x, weights = (layout.in_order(device, each) for each in inputs)
        filters, count = out.shape[3], out.shape[1:3]
        columns = _Columns(attrs["windows"], groups, attrs.get("short", False), x.shape[1:], count)
        memory = None if columns.is_image else columns.memory(len(x), x.dtype)
        width = columns.width
        for piece in columns.pieces(len(x), x.itemsize):
            rows, target = columns.unfold(memory, x[piece]), out[piece]
            sizes = (len(target) * prod(count), width, filters // groups)
            for g in range(groups):
                left = _matrix(rows, groups * width, g, groups)
                right = _matrix(weights, filters, g, groups)
                columns.multiply(
                    out.dtype, _matrix(target, filters, g, groups), left, right, sizes, False
                )

    return kernel


def conv2d_images(_: str) -> Kernel:
    """Return the kernel of a convolution's gradient by its images."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        device, groups = current_stream().device, attrs["groups"]
        dy, weights = (layout.in_order(device, each) for each in inputs)
        filters, count = dy.shape[3], dy.shape[1:3]
        columns = _Columns(
            attrs["windows"], groups, attrs.get("short", False), out.shape[1:], count
        )
        memory = None if columns.is_image else columns.memory(len(out), out.dtype)
        width = columns.width
        for piece in columns.pieces(len(out), out.itemsize):
            target, part = out[piece], dy[piece]
            rows = target if memory is None else memory
            sizes = (len(part) * prod(count), filters // groups, width)
            for g in range(groups):
                left = _matrix(part, filters, g, groups)
                right = _matrix(weights, filters, g, groups, blas.TRANSPOSED)
                columns.multiply(
                    out.dtype, _matrix(rows, groups * width, g, groups), left, right, sizes
                )
            if memory is not None:
                columns.fold(target, rows)

    return kernel


def conv2d_kernel(_: str) -> Kernel:
    """Return the kernel of a convolution's gradient by its kernel."""

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        x, dy = inputs
        if not x.size or not dy.size:
            copies.set_number(out, 0)
            return
        device, groups = current_stream().device, attrs["groups"]
        x, dy = layout.in_order(device, x), layout.in_order(device, dy)
        filters, count = dy.shape[3], dy.shape[1:3]
        columns = _Columns(attrs["windows"], groups, attrs.get("short", False), x.shape[1:], count)
        memory = None if columns.is_image else columns.memory(len(x), x.dtype)
        width = columns.width
        for piece in columns.pieces(len(x), x.itemsize):
            rows, part = columns.unfold(memory, x[piece]), dy[piece]
            sizes = (width, len(part) * prod(count), filters // groups)
            for g in range(groups):
                left = _matrix(rows, groups * width, g, groups, blas.TRANSPOSED)
                right = _matrix(part, filters, g, groups)
                target = _matrix(out, filters, g, groups)
                columns.multiply(out.dtype, target, left, right, sizes, piece.start > 0)

    return kernel


def pooling(operator: str) -> Kernel:
    """Return the kernel of a pooling, or of one of its gradients."""
    is_of_images = operator.endswith("_gradient")  # its output has the shape of the images

    def kernel(out: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        if not out.size:
            return
        device = current_stream().device
        plain = [layout.in_order(device, x) for x in inputs]
        images, pooled = (out, plain[0]) if is_of_images else (plain[0], out)
        described = _windows(attrs["windows"], images.shape, pooled.shape[1:3])
        launch(
            *("images", f"{operator}_{suffix(out.dtype)}", blocks(out.size)),
            f"{'P ' * (1 + len(plain))}{_WINDOWS}",
            *(pointer(out), *map(pointer, plain), described),
        )

    return kernel
