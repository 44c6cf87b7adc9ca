"""Conversion to another dtype, and `stop_gradient`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.comm.arguments.arrays import dtype_named
from allreduce.graph.core.op_table import Attrs, cut, register
from allreduce.graph.core.spec import Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.common import cast, same_spec
from allreduce.graph.trace.dispatch import apply, as_tensor


def _cast(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    np.copyto(out, inputs[0], casting="unsafe")


register(
    "cast",
    lambda specs, attrs: Spec(specs[0].shape, attrs["dtype"]),
    _cast,
    lambda dy, y, x, attrs: [cast(dy, x[0].dtype)],
    elementwise=True,
)


def stop_gradient(x: Any) -> Tensor:
    """Pass the value on, and no gradient back."""
    return apply("stop_gradient", as_tensor(x))


register("stop_gradient", same_spec, gradient=cut, view=lambda x, attrs: x)


def _round_to_bfloat16(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    np.copyto(out, inputs[0].astype(dtype_named("bfloat16")))


register("round_to_bfloat16", same_spec, _round_to_bfloat16, lambda dy, y, x, attrs: [dy])
