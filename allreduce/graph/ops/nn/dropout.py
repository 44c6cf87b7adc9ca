"""Dropout, drawn from a counter-based generator.

A draw is a function of seed, operator, step and global row, not of earlier draws. So it does not
depend on the number of replicas.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.errors import UsageError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.seed import checked, get_seed
from allreduce.graph.core.spec import Spec, own_axes
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_number
from allreduce.graph.ops.common import as_floats, floats_only, same_spec, swap_axes, through_float32
from allreduce.graph.trace.dispatch import apply, as_tensor, next_draw, runtime


def dropout(x: Any, rate: float, seed: int | None = None) -> Tensor:
    """Set a share of the elements to 0 and scale the rest up, so that the expectation stays.

    Source: Srivastava et al., "Dropout" (JMLR 2014), section 4, with the scaling moved to training.

    Args:
        x: `(batch, …)`, or with the batch on another axis, or merged with other axes as in
            `(4*batch, …)`. The mask depends on the index in the global batch; for a tensor without
            a batch axis, such as a variable, all replicas use the same mask.
        rate: The share to drop, in [0, 1).
        seed: Determines the draw, with the operator's place in the step and the step's number; by
            default the seed of `ar.set_seed`.

    Raises:
        UsageError: The rate is not a number in [0, 1).
    """
    if not 0 <= as_number("the rate of a dropout", rate) < 1:
        raise UsageError(f"{users_line()}: the rate of a dropout is in [0, 1), got {rate}")
    tensor = as_floats(x)
    if rate == 0:
        return tensor
    key = key_of(get_seed() if seed is None else checked(seed), "dropout", next_draw())
    for axis, factor in own_axes(tensor.shape):
        rows = swap_axes(tensor, 0, axis)
        attrs = {"rate": rate, "key": key, "rows_per_sample": factor}
        kept = apply("dropout", rows, runtime("row_offset"), runtime("step"), **attrs)
        return swap_axes(kept, 0, axis)
    nowhere = as_tensor(0, np.int64)
    attrs = {"rate": rate, "key": key, "rows_per_sample": 1}
    return apply("dropout", tensor, nowhere, runtime("step"), **attrs)


@through_float32
def _dropout(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    if out.size:
        settings = [attrs["rate"], attrs["key"], attrs["rows_per_sample"]]
        _native.run_rows("dropout", out, inputs, settings)


def _dropout_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    return floats_only(same_spec)(specs[:1], attrs)


def _dropout_gradient(
    dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs
) -> list[Tensor | None]:
    return [apply("dropout", dy, x[1], x[2], **attrs), None, None]


register("dropout", _dropout_shape, _dropout, _dropout_gradient)


def key_of(seed: int, what: str, draw: int) -> int:
    """Hash the seed and the draw into a generator's 64-bit key."""
    digest = blake2b(f"{seed} {what} {draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
