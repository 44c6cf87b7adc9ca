"""Shapes and dtypes of values before they exist.

A dimension is an int or a `Dim`, a named size that is known only when a step runs. One traced
program therefore serves every batch size, including a smaller last batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.source_location import users_line


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension times an integer: `batch`, or `8*batch` after two axes were merged."""

    name: str = "batch"
    factor: int = 1

    def __mul__(self, other: Any) -> Dim:
        if not isinstance(other, int | np.integer):
            raise self.unknown()
        return Dim(self.name, self.factor * int(other))

    __rmul__ = __mul__

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.unknown()

    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __index__(self) -> int:
        raise TypeError(str(self.unknown()))

    def unknown(self) -> UsageError:
        """Return the error for a use that needs to know the size."""
        return UsageError(
            f"{users_line()}: the size {self} is known only when the step runs; "
            "ar.ops.size(x, axis) gives it as a tensor"
        )

    def __str__(self) -> str:
        return self.name if self.factor == 1 else f"{self.factor}*{self.name}"


BATCH = Dim("batch")  # a replica's rows
GLOBAL_BATCH = Dim("global_batch")  # those of all replicas
Size = int | Dim
Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape and dtype of a tensor."""

    shape: Shape
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype.name}{show(self.shape)}"


def show(shape: Iterable[Size | str]) -> str:
    """Format a shape: `(batch, 10)`."""
    sizes = [str(size) for size in shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


def concrete(shape: Shape, batch: int, rows_per_replica: int = 0) -> tuple[int, ...]:
    """Replace named dimensions by sizes: the replica's rows, or those of all replicas."""
    return tuple(
        size
        if isinstance(size, int)
        else size.factor * (rows_per_replica if size.name == GLOBAL_BATCH.name else batch)
        for size in shape
    )


def normal(size: Size) -> Size:
    """Let a size through; none of a named one is 0, which tells nothing of it."""
    return size if isinstance(size, int) or size.factor else 0


def own_axes(shape: Shape) -> list[tuple[int, int]]:
    """List the axes that count the replica's rows, and the rows per sample in each."""
    return [
        (axis, size.factor)
        for axis, size in enumerate(shape)
        if isinstance(size, Dim) and size.name == BATCH.name
    ]


def size_of(shape: Shape) -> Size:
    """Multiply the sizes; at most one may be named, unless another is 0.

    Raises:
        ShapeError: Two dimensions are named.
    """
    named = [size for size in shape if isinstance(size, Dim)]
    fixed = prod(size for size in shape if isinstance(size, int))
    if not named or not fixed:
        return fixed
    if len(named) > 1:
        raise ShapeError(f"shape {show(shape)} has more than one named dimension; merge other axes")
    return named[0] * fixed


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Combine shapes by NumPy's rule; a named dimension matches itself and 1.

    Raises:
        ShapeError: Two sizes of one axis differ and neither is 1.
    """
    ndim = max((len(shape) for shape in shapes), default=0)
    result: list[Size] = []
    for axis in range(-ndim, 0):
        sizes = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        if len(sizes) > 1:
            listed = " and ".join(show(shape) for shape in shapes)
            raise ShapeError(f"shapes {listed} do not broadcast: axis {axis} differs")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def broadcasts_to(shape: Shape, target: Shape) -> bool:
    """Return whether a shape broadcasts to another one."""
    try:
        return broadcast([shape, target]) == target
    except ShapeError:
        return False


def normalize_axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Convert an axis argument to sorted, non-negative, distinct axes; None means all.

    Raises:
        ShapeError: An axis is not an integer, is out of range, or is repeated.
    """
    axes = range(ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    found = set()
    for each in axes:
        try:
            index = operator.index(each)
        except TypeError:
            raise ShapeError(f"axis {each!r} is no integer") from None
        if not -ndim <= index < ndim:
            raise ShapeError(f"axis {index} is out of range for {ndim} dimensions")
        found.add(index % ndim)
    if len(found) < len(axes):
        raise ShapeError(f"an axis is there twice in {axis}")
    return tuple(sorted(found))
