"""Dropout, drawn from a counter-based generator.

A draw is a function of seed, operator, step and global row, not of what was drawn before. So it
does not depend on how many replicas share the rows.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.errors import UsageError
from allreduce.graph.ops.base import Attrs, Op, register
from allreduce.graph.ops.common import as_floats, floats_only, same_spec, through_float32
from allreduce.graph.scope import users_line
from allreduce.graph.seed import get_seed
from allreduce.graph.spec import Spec
from allreduce.graph.tensor import Tensor
from allreduce.graph.trace import apply, next_draw, runtime


def dropout(x: Any, rate: float, seed: int | None = None) -> Tensor:
    """Set a share of the elements to 0 and scale the rest up, so that the expectation stays.

    Source: Srivastava et al., "Dropout" (JMLR 2014), section 4, with the scaling moved to training.

    Args:
        x: `(batch, …)`. What is dropped in a row depends on its index in the global batch.
        rate: The share to drop, in [0, 1).
        seed: Decides the draw, with the operator's place in the step and the step's number; by
            default what `ar.set_seed` was given.

    Raises:
        UsageError: The rate is out of range.
    """
    if not 0 <= rate < 1:
        raise UsageError(f"{users_line()}: the rate of a dropout is in [0, 1), got {rate}")
    tensor = as_floats(x)
    if rate == 0:
        return tensor
    key = _key(get_seed() if seed is None else seed, next_draw())
    return apply("dropout", tensor, runtime("row_offset"), runtime("step"), rate=rate, key=key)


@through_float32
def _dropout(out: Any, inputs: Sequence[np.ndarray], attrs: Attrs) -> np.ndarray:
    x, row_offset, step = inputs
    _native.dropout(out, x, attrs["rate"], attrs["key"], int(row_offset), int(step))
    result: np.ndarray = out
    return result


def _dropout_shape(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    return floats_only(same_spec)(specs[:1], attrs)


def _dropout_gradient(
    dy: Tensor, y: Tensor, x: Sequence[Tensor], attrs: Attrs
) -> list[Tensor | None]:
    return [apply("dropout", dy, x[1], x[2], **attrs), None, None]


register(Op("dropout", _dropout_shape, _dropout, _dropout_gradient))


def _key(seed: int, draw: int) -> int:
    """Hash what is drawn into the generator's 64-bit key."""
    digest = blake2b(f"{seed} dropout {draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
