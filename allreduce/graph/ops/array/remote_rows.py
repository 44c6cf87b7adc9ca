"""Rows of a table that parameter servers hold: looked up in a step, with gradients of rows only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.spec import Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.array.gather import check_indices
from allreduce.graph.ops.common import as_integers, given_shape
from allreduce.graph.trace.dispatch import apply, as_tensor


class RemoteTable(Protocol):
    """A table of vectors that this process does not hold.

    Attributes:
        rows: The number of vectors.
        width: Their size.
    """

    rows: int
    width: int

    def read(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Copy the rows `numbers` `(n,)` to `out` `(n, width)`."""
        ...

    def add_gradient(self, numbers: np.ndarray, gradients: np.ndarray) -> None:
        """Keep gradients `(n, width)` of the rows `numbers` `(n,)` for the update of the step."""
        ...


def lookup_rows(table: RemoteTable, anchor: Any, numbers: Any) -> Tensor:
    """Take rows of a remote table by their numbers.

    Args:
        anchor: A variable in its place: an optimizer that changes it updates the rows, too.
        numbers: Integers from 0 to rows - 1, of any shape.
    """
    return apply(
        "lookup_rows",
        as_tensor(anchor),
        as_integers("the numbers of a table", numbers),
        table=table,
    )


def _shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    anchor, numbers = specs
    return Spec((*numbers.shape, attrs["table"].width), anchor.dtype)


def _lookup(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    table, numbers = attrs["table"], inputs[1]
    if not numbers.size:
        return
    check_indices(numbers, table.rows, wrap=False)
    table.read(numbers.reshape(-1), out.reshape(-1, table.width))


def _gradient(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    gradients, numbers = inputs
    out.fill(0)  # of the anchor
    if numbers.size:
        table = attrs["table"]
        table.add_gradient(numbers.reshape(-1), gradients.reshape(-1, table.width))


register(
    "lookup_rows",
    _shape,
    _lookup,
    lambda dy, y, x, attrs: [
        apply("keep_row_gradients", dy, x[1], table=attrs["table"], shape=x[0].shape),
        None,
    ],
)
register("keep_row_gradients", given_shape, _gradient)
