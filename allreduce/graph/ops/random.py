"""Dropout and initial values, drawn from a counter-based generator.

A draw is a function of what it is for (seed, operator, row, step; or seed and name), not of what
was drawn before. So it depends neither on how many replicas share the rows nor on who draws first.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.errors import UsageError
from allreduce.graph.ops.base import Attrs, Op, register
from allreduce.graph.ops.common import as_floats, floats_only, same_spec, through_float32
from allreduce.graph.scope import users_line
from allreduce.graph.spec import Spec
from allreduce.graph.tensor import Tensor
from allreduce.graph.trace import apply, next_draw, runtime


def dropout(x: Any, rate: float, seed: int) -> Tensor:
    """Set a share of the elements to 0 and scale the rest up, so that the expectation stays.

    Source: Srivastava et al., "Dropout" (JMLR 2014), section 4, with the scaling moved to training.

    Args:
        x: `(batch, …)`. What is dropped in a row depends on its index in the global batch.
        rate: The share to drop, in [0, 1).
        seed: Decides the draw together with the operator's place in the step and the step's number.

    Raises:
        UsageError: The rate is out of range.
    """
    if not 0 <= rate < 1:
        raise UsageError(f"{users_line()}: the rate of a dropout is in [0, 1), got {rate}")
    tensor = as_floats(x)
    if rate == 0:
        return tensor
    key = _key(seed, f"dropout {next_draw()}")
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


def uniform_values(
    seed: int,
    path: str,
    shape: Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    dtype: Any = np.float32,
) -> np.ndarray:
    """Draw initial values evenly from [low, high).

    Args:
        seed: The program's seed.
        path: What the values are for; another path gives other values.
        shape: Concrete sizes.
        low: Smallest value.
        high: Bound of the values.
        dtype: Of the result; the draws are float64 before they are rounded to it.
    """
    draws = _uniform(seed, path, prod(shape)) * (high - low) + low
    return draws.astype(dtype).reshape(shape)


def normal_values(
    seed: int,
    path: str,
    shape: Sequence[int],
    mean: float = 0.0,
    deviation: float = 1.0,
    dtype: Any = np.float32,
) -> np.ndarray:
    """Draw initial values from a normal distribution; arguments as in `uniform_values`.

    Source: Box and Muller, "A note on the generation of random normal deviates" (1958).
    """
    count = prod(shape)
    pairs = _uniform(seed, path, count + count % 2).reshape(2, -1)
    radius = np.sqrt(-2 * np.log1p(-pairs[0]))
    angle = 2 * np.pi * pairs[1]
    draws = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return (draws * deviation + mean).astype(dtype).reshape(shape)


def _uniform(seed: int, path: str, count: int) -> np.ndarray:
    """Draw float64 numbers from [0, 1) with 53 random bits each."""
    counters = np.zeros(((count + 1) // 2, 4), np.uint32)
    index = np.arange(len(counters), dtype=np.uint64)
    counters[:, 0], counters[:, 1] = index & np.uint64(0xFFFFFFFF), index >> np.uint64(32)
    words = np.empty_like(counters)
    _native.philox(words, counters, _key(seed, path))
    draws: np.ndarray = (words.view(np.uint64).reshape(-1)[:count] >> np.uint64(11)) * 2.0**-53
    return draws


def _key(seed: int, path: str) -> int:
    """Hash what a draw is for into the generator's 64-bit key."""
    digest = blake2b(f"{seed}\0{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
