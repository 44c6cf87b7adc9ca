"""Collectives in the middle of a step, for contrastive losses, shared statistics and the like.

Every replica takes part, also one without samples: it adds nothing. With one replica they cost
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError, unknown_name
from allreduce.graph.core.node import Node
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import GLOBAL_BATCH, Dim, Size, Spec, own_axes, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.common import given_shape, same_spec
from allreduce.graph.trace.dispatch import apply, as_tensor, runtime
from allreduce.graph.trace.trace import current_trace

_REDUCED = "fiu"  # kinds of dtypes


def replica_id() -> Tensor:
    """Return which replica runs this, an int64 from 0; 0 outside of functions."""
    return runtime("replica")


def all_reduce(x: Any, op: str = "sum") -> Tensor:
    """Combine all replicas' values element by element; every replica gets the result.

    A replica without samples counts for nothing, whatever it would bring, so a mean is a sum of
    values divided by a sum of counts.

    Args:
        x: Of one shape on all replicas: a sum over rows, not the rows.
        op: "sum", whose gradient is the sum of the replicas' gradients; "min", "max" and "prod",
            which have none.

    Raises:
        UsageError: There is no such operator, or none for booleans.
        ShapeError: The shape has an axis of the replica's own rows.
    """
    if op not in _NEUTRAL:
        if op == "mean":
            raise UsageError(
                f"{users_line()}: all_reduce in a step has no mean, because replicas may have "
                "different numbers of samples: divide a sum of values by a sum of counts"
            )
        raise unknown_name("operator of all_reduce", op, _NEUTRAL)
    tensor = as_tensor(x)
    if tensor.dtype.kind not in _REDUCED:
        raise UsageError(f"{users_line()}: all_reduce combines numbers, not {tensor.dtype}")
    if own_axes(tensor.shape):
        raise ShapeError(
            f"{users_line()}: all_reduce of {show(tensor.shape)}: replicas have rows of their own; "
            "sum over them first, or use all_gather"
        )
    if _replicas() == 1:
        return tensor
    return apply("all_reduce", tensor, op=op)


def all_gather(x: Any) -> Tensor:
    """Join all replicas' rows, in the order of the replicas; every replica gets all.

    The gradient of a replica's rows is the sum of their gradients over all replicas' losses.

    Args:
        x: `(batch, …)`, or with equal numbers of rows on all replicas; rows that depend on samples
            are zeros on a replica without samples.

    Returns:
        `(global_batch, …)`: the rows in the order of the global batch; or `(replicas * rows, …)`.

    Raises:
        ShapeError: There are no rows, they are all replicas', or the own ones are not on axis 0.
    """
    tensor = as_tensor(x)
    if not tensor.ndim:
        raise ShapeError(f"{users_line()}: all_gather joins rows; a scalar has none")
    if any(axis for axis, _ in own_axes(tensor.shape)):
        raise ShapeError(
            f"{users_line()}: all_gather of {show(tensor.shape)}: replicas have rows of their own "
            "on another axis than the first; transpose before, and back"
        )
    if _replicas() == 1:
        return tensor
    rows = tensor.shape[0]
    if isinstance(rows, Dim) and rows.name == GLOBAL_BATCH.name:
        raise ShapeError(
            f"{users_line()}: all_gather of {show(tensor.shape)}: these are all replicas' rows "
            "already"
        )
    factor = rows.factor if isinstance(rows, Dim) else None
    return apply("all_gather", tensor, rows_per_sample=factor, replicas=_replicas())


def _replicas() -> int:
    trace = current_trace()
    return 1 if trace is None else trace.replicas


def _sum_over_replicas(
    dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs
) -> list[Tensor | None]:
    return [apply("all_reduce", dy, op="sum") if attrs["op"] == "sum" else None]


register("all_reduce", same_spec, gradient=_sum_over_replicas, kind="collective")


def _gathered(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    (x,) = specs
    rows = x.shape[0]
    if isinstance(rows, Dim):
        every: Size = GLOBAL_BATCH * rows.factor
    else:
        every = rows * attrs["replicas"]
    return Spec((every, *x.shape[1:]), x.dtype)


def _own_rows(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    total = apply("all_reduce", dy, op="sum")
    start = runtime("replica" if attrs["rows_per_sample"] is None else "row_offset")
    return [apply("own_rows", total, start, shape=x[0].shape)]


register("all_gather", _gathered, gradient=_own_rows, kind="collective")


def _take_own(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    gathered, start = inputs
    first = int(start) * _unit(attrs["shape"][0])
    out[...] = gathered[first : first + len(out)]


def _put_own(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    rows, start = inputs
    first = int(start) * _unit(attrs["rows"])
    out.fill(0)
    out[first : first + len(rows)] = rows


def _unit(rows: Size) -> int:
    """Return how many rows a replica, or with a named dimension each sample, has."""
    return rows.factor if isinstance(rows, Dim) else rows


def _own_rows_gradient(
    dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs
) -> list[Tensor | None]:
    rows = attrs["shape"][0]
    return [apply("among_rows", dy, x[1], shape=x[0].shape, rows=rows), None]


def _among_rows_gradient(
    dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs
) -> list[Tensor | None]:
    return [apply("own_rows", dy, x[1], shape=x[0].shape), None]


register("own_rows", given_shape, _take_own, _own_rows_gradient)
register("among_rows", given_shape, _put_own, _among_rows_gradient)

# Operators that do not change the values.
_NEUTRAL: dict[str, Callable[[np.dtype[Any]], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lambda dtype: -np.inf if dtype.kind == "f" else np.iinfo(dtype).min,
    "min": lambda dtype: np.inf if dtype.kind == "f" else np.iinfo(dtype).max,
}


def neutral_contribution(node: Node, shape: tuple[int, ...]) -> np.ndarray:
    """Return the contribution of a replica without samples to a collective."""
    dtype = node.spec.dtype
    if node.op == "all_reduce":
        return np.full(shape, _NEUTRAL[node.attrs["op"]](dtype), dtype)
    rows = 0 if node.attrs["rows_per_sample"] is not None else shape[0] // node.attrs["replicas"]
    return np.zeros((rows, *shape[1:]), dtype)
