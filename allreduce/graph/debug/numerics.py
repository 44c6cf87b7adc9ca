"""Find the first operation that makes a NaN or an infinity: `ar.config.enable_check_numerics()`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allreduce import devices, events
from allreduce.errors import NumericsError


def check(op: str, source: str, out: np.ndarray, inputs: Sequence[np.ndarray], when: str) -> None:
    """Raise an error if a value is not finite.

    Raises:
        NumericsError: Gives the number of elements that are not finite, and describes the inputs.
    """
    if out.dtype.kind != "f":
        return
    out, *inputs = [x if type(x) is np.ndarray else devices.read(x) for x in (out, *inputs)]
    if np.isfinite(out).all():
        return
    read = "; ".join(f"input {i}: {describe(x)}" for i, x in enumerate(inputs)) or "no inputs"
    rank = events.current_rank()
    raise NumericsError(
        f"{'' if rank is None else f'rank {rank}, '}{when}: {op} at {source} made {describe(out)}, "
        f"from {read}"
    )


def describe(x: np.ndarray) -> str:
    """Describe an array's dtype, shape, range and share of NaN and infinity."""
    what = f"{x.dtype}{x.shape}"
    if x.dtype.kind != "f":
        return f"{what} from {x.min()} to {x.max()}" if x.size else what
    finite = x[np.isfinite(x)]
    parts = [f"from {finite.min():g} to {finite.max():g}"] if finite.size else []
    for count, name in ((np.isnan(x).sum(), "NaN"), (np.isinf(x).sum(), "Inf")):
        parts += [f"{count} {name}"] if count else []
    return f"{what} {', '.join(parts)}" if parts else what
