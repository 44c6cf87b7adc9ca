"""Sums along an axis up to each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.devices.integers import switch
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_axis
from allreduce.graph.ops.array.shape import reshape
from allreduce.graph.ops.common import cast, same_spec
from allreduce.graph.trace.dispatch import apply, as_tensor


def cumsum(x: Any, axis: int | None = None, reverse: bool = False) -> Tensor:
    """Add up along an axis, to each element the ones before it.

    Args:
        x: Any tensor; small integers are added as int64.
        axis: By default all elements are one row.
        reverse: Add the ones behind it instead.
    """
    tensor = as_tensor(x) if axis is not None else reshape(x, -1)
    if tensor.dtype.kind in "biu":
        tensor = cast(tensor, np.add.reduce(np.zeros(1, tensor.dtype)).dtype)
    at = as_axis("cumsum", tensor, 0 if axis is None else axis)
    return apply("cumsum", tensor, axis=at, reverse=switch("cumsum: reverse", reverse))


def _cumsum(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    here = [slice(None)] * out.ndim
    if attrs["reverse"]:
        here[attrs["axis"]] = slice(None, None, -1)
    np.cumsum(inputs[0][tuple(here)], axis=attrs["axis"], out=out[tuple(here)])


def _cumsum_gradient(dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs) -> list[Tensor]:
    return [apply("cumsum", dy, axis=attrs["axis"], reverse=not attrs["reverse"])]


register("cumsum", same_spec, _cumsum, _cumsum_gradient)
