"""The texts of calls with a list, factors or plain data.

Such a text must agree on all members, and describes the call in errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from allreduce.comm.arguments.checks import Context, Options
from allreduce.comm.arguments.scaling import Factor
from allreduce.comm.calls.call import Array, bounded

_Kind = tuple[np.dtype[np.generic], tuple[int, ...]]


def of_array(
    collective: str, dtype: np.dtype[np.generic], shape: tuple[int, ...], options: Options
) -> str:
    """Write a call of one array that has factors: `all_reduce(float64[3], op='sum', prescale=2)`.

    Without factors it is "": such a call needs no text.
    """
    if options.scale == (1, 1):
        return ""
    rows = (options.counts, options.receives)
    shares = tuple(None if each is None else tuple(each) for each in rows)
    kinds = ((dtype, shape),)
    return _spell(collective, kinds, False, options.op, options.root, options.scale, shares)


def of_list(context: Context, arrays: Sequence[Array], options: Options) -> str:
    """Write a call of a list: `all_reduce([float64[8], int32[2, 2]], op='sum')`."""
    kinds = tuple((array.dtype, array.shape) for array in arrays)
    scale, root = options.scale, options.root
    return _spell(context.collective, kinds, True, options.op, root, scale)


@lru_cache(maxsize=256)
def _spell(
    collective: str,
    kinds: tuple[_Kind, ...],
    listed: bool,
    op: str | None,
    root: int | None,
    scale: tuple[Factor, Factor],
    shares: tuple[tuple[int, ...] | None, ...] = (None, None),
) -> str:
    arrays = [array_text(dtype, shape) for dtype, shape in kinds]
    options = {"op": op, "root": root}
    factors = {"prescale": scale[0], "postscale": scale[1]}
    named_arguments = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    named_arguments += [f"{name}={value!r}" for name, value in factors.items() if value != 1]
    if listed:
        rest = f"]{''.join(f', {each}' for each in named_arguments)})"
        text = f"{collective}([{', '.join(arrays)}{rest}"
        return bounded(text, f" {len(arrays)} arrays{rest}")
    named = zip(("counts", "receives"), shares, strict=True)
    named_arguments += [f"{name}={list(rows)}" for name, rows in named if rows is not None]
    return bounded(f"{collective}({', '.join([*arrays, *named_arguments])})")


def array_text(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """Write an array's dtype and shape: `float64[2, 3]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"
