"""Random tensors, drawn from a counter-based generator.

Each element's place in the global batch is its counter: draws depend on seed, operator, step and
place, not on the number of replicas.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3 (the
generator is NumPy's Philox); Box and Muller, "A note on the generation of random normal deviates"
(1958).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.op_table import Attrs, register
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.seed import checked, get_seed
from allreduce.graph.core.spec import Size, Spec, own_axes, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops.arguments import as_dtype, as_number, as_shape
from allreduce.graph.ops.array.gather import take
from allreduce.graph.ops.common import swap_axes
from allreduce.graph.ops.nn.dropout import key_of
from allreduce.graph.trace.dispatch import apply, as_tensor, next_draw, runtime

_PER_COUNTER = 4  # 64-bit numbers that the generator makes of one counter


def uniform(
    shape: Sequence[Size],
    low: float = 0.0,
    high: float = 1.0,
    dtype: Any = "float32",
    seed: int | None = None,
) -> Tensor:
    """Draw evenly from `low` to below `high`.

    Args:
        shape: Any size may be a named one, as `x.shape[0]`: each sample has its own numbers then.
            Without one all replicas draw the same.
        low: The lower bound, a Python number.
        high: The upper bound, a Python number.
        dtype: A floating type.
        seed: Determines the draw, with the operator's place in the step and the step's number; by
            default the seed of `ar.set_seed`.

    Raises:
        UsageError: The dtype is no floating type, a number is not finite, `high` is below `low`,
            or the seed is none that `ar.set_seed` takes.
        ShapeError: Two sizes are named: how wide a row is would depend on how the batch is shared.
    """
    _finite("uniform", low=low, high=high)
    if low > high:
        raise UsageError(f"{users_line()}: uniform draws from low to high, not {low} to {high}")
    return _draw("uniform", shape, dtype, seed, low=float(low), high=float(high))


def normal(
    shape: Sequence[Size],
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: Any = "float32",
    seed: int | None = None,
) -> Tensor:
    """Draw from a normal distribution; arguments as for `uniform`.

    Raises:
        UsageError: As there, and the deviation is negative.
        ShapeError: As there.
    """
    _finite("normal", mean=mean, stddev=stddev)
    if stddev < 0:
        raise UsageError(f"{users_line()}: the stddev of normal is not negative: {stddev}")
    return _draw("normal", shape, dtype, seed, mean=float(mean), stddev=float(stddev))


def permutation(x: Any, seed: int | None = None) -> Tensor:
    """Shuffle the rows of a tensor, or the numbers below an integer; the same on all replicas.

    Args:
        x: An integer, or a tensor whose first size is known.
        seed: As for `uniform`.
    """
    whole = isinstance(x, int | np.integer) and not isinstance(x, bool) and x >= 0
    tensor = as_tensor(np.arange(x)) if whole else as_tensor(x)
    count = tensor.shape[0] if tensor.ndim else None
    if not isinstance(count, int):
        raise UsageError(
            f"{users_line()}: permutation shuffles the numbers below an integer that is 0 or more, "
            f"or rows of a known count, not {x!r:.60}"
        )
    keys = _draw("uniform", (count,), "float64", seed, low=0.0, high=1.0)
    return take(tensor, apply("order", keys), axis=0)


def _finite(name: str, **numbers: Any) -> None:
    for what, number in numbers.items():
        if not math.isfinite(as_number(f"the {what} of {name}", number)):
            raise UsageError(f"{users_line()}: the {what} of {name} is a finite number: {number}")


def _draw(name: str, shape: Any, dtype: Any, seed: int | None, **attrs: float) -> Tensor:
    sizes, kind = as_shape(name, shape), as_dtype(dtype)
    if kind.kind != "f":
        raise UsageError(f"{users_line()}: {name} draws floats, not {kind}")
    own = own_axes(tuple(sizes))
    if len(own) > 1:
        raise ShapeError(
            f"{users_line()}: {name} of {show(sizes)}: each sample's numbers would depend on how "
            "many share its replica; only one size may be named"
        )
    axis, factor = own[0] if own else (0, 1)
    turned = list(sizes)
    if own:
        turned[0], turned[axis] = turned[axis], turned[0]
    offset = runtime("row_offset") if own else as_tensor(0, np.int64)
    drawn = apply(
        name,
        offset,
        runtime("step"),
        shape=tuple(turned),
        dtype=kind,
        key=key_of(get_seed() if seed is None else checked(seed), name, next_draw()),
        rows_per_sample=factor,
        **attrs,
    )
    return swap_axes(drawn, 0, axis) if own else drawn


def _numbers(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs, each: int) -> np.ndarray:
    """Draw `each` numbers in [0, 1) for every element, in float64: `(elements, each)`."""
    offset, step = (int(x) for x in inputs)
    row = out[0].size if out.ndim and len(out) else 1
    first = offset * attrs["rows_per_sample"] * row * each
    key = np.array([attrs["key"], step], np.uint64)  # NumPy rounds a list of large ones to floats
    generator = np.random.Philox(key=key, counter=first // _PER_COUNTER)
    skipped = first % _PER_COUNTER
    drawn: np.ndarray = np.random.Generator(generator).random(skipped + out.size * each)
    return drawn[skipped:].reshape(-1, each)


def _uniform(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    low, high = attrs["low"], attrs["high"]
    numbers = low + _numbers(out, inputs, attrs, 1) * (high - low)
    out[...] = numbers.reshape(out.shape)
    if high > low:  # which rounding may have reached
        np.minimum(out, np.nextafter(out.dtype.type(high), out.dtype.type(low)), out=out)


def _normal(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    numbers = _numbers(out, inputs, attrs, 2)
    radius = np.sqrt(-2 * np.log1p(-numbers[:, 0]))
    deviates = radius * np.cos(2 * math.pi * numbers[:, 1])
    out[...] = (attrs["mean"] + attrs["stddev"] * deviates).reshape(out.shape)


def _given(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    return Spec(attrs["shape"], attrs["dtype"])


def _order(out: np.ndarray, inputs: Sequence[np.ndarray], attrs: Attrs) -> None:
    out[...] = np.argsort(inputs[0], kind="stable")


register("uniform", _given, _uniform)
register("normal", _given, _normal)
register("order", lambda specs, attrs: Spec(specs[0].shape, np.dtype(np.int64)), _order)
