"""Find the first operation that makes a NaN or an infinity: `ar.config.enable_check_numerics()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce import devices, events
from allreduce.devices import options
from allreduce.errors import NumericsError, UsageError
from allreduce.graph.core.op_table import Attrs, Op, located


def run_now(
    op: Op,
    inputs: Sequence[np.ndarray],
    attrs: Attrs,
    output: tuple[tuple[int, ...], np.dtype[Any]],
    where: Callable[[], tuple[str, str, str]],
) -> np.ndarray:
    """Run an operator's CPU kernel outside of a program, and check its value if that is on.

    Args:
        output: The shape and dtype of the value.
        where: Returns the user's line, the part of the model, and the replica and step.

    Raises:
        UsageError: The kernel refuses its inputs.
        NumericsError: The value is not finite.
    """
    assert op.cpu is not None, op.name
    out = np.empty(*output)
    with np.errstate(all="ignore"):  # infinities and NaN are results here, not warnings
        try:
            op.cpu(out, inputs, attrs)
        except UsageError as error:
            line, part, _ = where()
            raise located(error, op.name, line, part) from error.__cause__
    if options.current().check_numerics:
        line, _, when = where()
        check(op.name, line, out, inputs, when)
    return out


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
