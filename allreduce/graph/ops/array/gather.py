"""Elements by their indices, and back: embedding, top_k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import BATCH, Dim, Spec, own_axes, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axis, as_shape
from allreduce.graph.ops.common import as_integers, given_shape
from allreduce.graph.trace.dispatch import apply, as_tensor


def take(x: Any, indices: Any, axis: int = 0) -> Tensor:
    """Take slices of an axis by their indices: an embedding's rows by their words.

    Args:
        x: `(…, n, …)`, n along `axis`.
        indices: Integers from -n to n - 1, of any shape; negative ones count from the end.
        axis: Of `x`; the indices' axes take its place.

    Raises:
        ShapeError: The axis is a replica's batch, of which the indices know nothing.
        UsageError: The indices are not integers; when the step runs, one is out of range.
    """
    tensor = as_tensor(x)
    at = as_axis("take", tensor, axis)
    numbers = as_integers("the indices of take", indices)
    size = tensor.shape[at]
    if isinstance(size, Dim) and size.name == BATCH.name and not own_axes(numbers.shape):
        raise ShapeError(
            f"{users_line()}: take of {show(tensor.shape)}: axis {at} is as long as the replica's "
            "part of the batch, in which the indices would mean other rows on each replica; "
            "ar.all_gather(x) has the rows of all"
        )
    return apply("take", tensor, numbers, axis=at, wrap=True)


def embedding(table: Any, numbers: Any) -> Tensor:
    """Take rows of a table by their numbers.

    Args:
        table: `(rows, …)`.
        numbers: Integers from 0 to rows - 1, of any shape.

    Raises:
        ShapeError: The table has no axis.
        UsageError: The numbers are not integers; when the step runs, one is out of range.
    """
    rows = as_tensor(table)
    if not rows.ndim:
        raise ShapeError(f"{users_line()}: embedding needs a table (rows, …), not a scalar")
    return apply("take", rows, as_integers("the numbers of embedding", numbers), axis=0, wrap=False)


def check_indices(indices: np.ndarray, size: int, wrap: bool) -> None:
    """Refuse an index out of range; negative ones are, unless they wrap.

    They are compared in their own dtype: int64 does not hold all of uint64.
    """
    first = -size if wrap else 0
    bad = (indices < first) | (indices >= size)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        if not wrap:
            raise UsageError(
                f"number {indices[place]} is outside of 0…{size - 1}, the rows of the table; it "
                f"is at position {show(place)} of {show(indices.shape)}"
            )
        raise UsageError(
            f"index {indices[place]} at place {show(place)} of {show(indices.shape)} is outside of "
            f"{first}…{size - 1}, an axis of {size} elements"
        )


def _from_front(indices: np.ndarray, size: int, wrap: bool = True) -> np.ndarray:
    """Check indices, and count them from the front."""
    check_indices(indices, size, wrap)
    at = indices.astype(np.int64)
    return np.where(at < 0, at + size, at)


def _take_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    x, indices = specs
    axis = attrs["axis"]
    return Spec((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)


def _take(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    x, indices = inputs
    rows = _from_front(indices, x.shape[attrs["axis"]], attrs["wrap"])
    if rows.size:
        np.take(x, rows, axis=attrs["axis"], out=out, mode="clip")


def _take_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor | None]:
    return [apply("scatter_add", dy, x[1], axis=attrs["axis"], shape=x[0].shape), None]


def _scatter_add(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    """Add slices at their indices; slices of one index in their order."""
    dy, indices = inputs
    axis, size = attrs["axis"], out.shape[attrs["axis"]]
    out.fill(0)
    rows = _from_front(indices, size).reshape(-1)
    if not rows.size or not dy.size:
        return
    before, after = out.shape[:axis], out.shape[axis + 1 :]
    parts = np.moveaxis(dy.reshape((*before, rows.size, *after)), axis, 0)
    order = np.argsort(rows, kind="stable")
    ranked = rows[order]
    first = np.flatnonzero(np.diff(ranked, prepend=-1))
    # Adding runs of equal rows up is some ten times as fast as np.add.at.
    sums = np.add.reduceat(parts[order], first, axis=0, dtype=out.dtype)
    np.moveaxis(out, axis, 0)[ranked[first]] = sums


register("take", _take_shape, _take, _take_gradient)
register(
    "scatter_add",
    given_shape,
    _scatter_add,
    lambda dy, y, x, attrs: [apply("take", dy, x[1], axis=attrs["axis"], wrap=True), None],
)


def take_along_axis(x: Any, indices: Any, axis: int = -1) -> Tensor:
    """Take elements of an axis by their indices, each row by its own, as NumPy's function does.

    Args:
        x: `(…, n, …)`, n along `axis`.
        indices: Integers, `(…, k, …)`: the shape of `x` except along that axis.
        axis: The axis of both.

    Raises:
        ShapeError: The other axes differ.
        UsageError: The indices are not integers; when the step runs, one is out of range.
    """
    tensor = as_tensor(x)
    at = as_axis("take_along_axis", tensor, axis)
    return apply(
        "take_along_axis", tensor, as_integers("the indices of take_along_axis", indices), axis=at
    )


def _along_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    x, indices = specs
    axis = attrs["axis"]
    others = [spec.shape[:axis] + spec.shape[axis + 1 :] for spec in specs]
    if x.ndim != indices.ndim or others[0] != others[1]:
        raise ShapeError(
            f"indices {show(indices.shape)} do not fit {show(x.shape)} but for axis {axis}"
        )
    return Spec(indices.shape, x.dtype)


def _along(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    x, indices = inputs
    axis = attrs["axis"]
    out[...] = np.take_along_axis(x, _from_front(indices, x.shape[axis]), axis)


def _add_along(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    dy, indices = inputs
    axis = attrs["axis"]
    out.fill(0)
    rows = np.moveaxis(_from_front(indices, out.shape[axis]), axis, -1)
    grid = np.indices(rows.shape, sparse=True)[:-1]
    np.add.at(np.moveaxis(out, axis, -1), (*grid, rows), np.moveaxis(dy, axis, -1))


register(
    "take_along_axis",
    _along_shape,
    _along,
    lambda dy, y, x, attrs: [
        apply("add_along_axis", dy, x[1], axis=attrs["axis"], shape=x[0].shape),
        None,
    ],
)
register(
    "add_along_axis",
    given_shape,
    _add_along,
    lambda dy, y, x, attrs: [apply("take_along_axis", dy, x[1], axis=attrs["axis"]), None],
)


def top_k(x: Any, k: int) -> tuple[Tensor, Tensor]:
    """Find the k largest elements of the last axis, in descending order, and where they are.

    Returns:
        Values and int64 indices, `(…, k)`; of equal elements the first comes first.

    Raises:
        ShapeError: The axis has fewer than k elements, or none are asked for.
    """
    tensor = as_tensor(x)
    (count,) = as_shape("the k of top_k", (k,), smallest=1)
    indices = apply("top_k_indices", tensor, k=count)
    return take_along_axis(tensor, indices, axis=-1), indices


def _top_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    (x,) = specs
    if not x.ndim or not isinstance(x.shape[-1], int) or x.shape[-1] < attrs["k"]:
        raise ShapeError(f"the last axis of {show(x.shape)} has no {attrs['k']} elements")
    return Spec((*x.shape[:-1], attrs["k"]), np.dtype(np.int64))


def _top_indices(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    (x,) = inputs
    # Reversed, so that a stable ascending sort leaves equal elements in order when turned round.
    order = np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    np.subtract(x.shape[-1] - 1, order[..., : attrs["k"]], out=out)


register("top_k_indices", _top_shape, _top_indices)
