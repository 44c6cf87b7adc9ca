"""Calls that hypothesis draws: any shape, strides, counts and kind of array, on all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.errors import AllreduceError
from tests.comm.cases import Array
from tests.comm.exchanges import Exported

FOLDS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "logical_and": np.logical_and,
    "bitwise_xor": np.bitwise_xor,
}
LAYOUTS = ("plain", "fortran", "strided", "reversed", "unaligned", "read-only")
KINDS = ("numpy", "memoryview", "exported")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "gather", "scatter", "broadcast")
CUT = ("reduce_scatter", "scatter", "all_to_all")


@dataclass(frozen=True)
class Drawn:
    """One call, as all ranks make it.

    Args:
        collective: Its name.
        op: Its operator, if it has one.
        dtype: Of all arrays.
        shape: Of the input; of `counts` all rows together, of others those of one share.
        counts: Rows of each rank, or None.
        root: Its root, if it has one.
        layout: How inputs lie in memory, one of `LAYOUTS`.
        kind: What lends them, one of `KINDS`.
        into: How `out` lies in memory, or None for a new output.
    """

    collective: str
    op: str | None
    dtype: str
    shape: tuple[int, ...]
    counts: tuple[int, ...] | None
    root: int
    layout: str
    kind: str
    into: str | None


def laid(values: Array, layout: str) -> Array:
    """Copy values to memory that they do not fill from begin to end in order."""
    if layout == "fortran" and values.ndim:
        return np.asfortranarray(values)
    if layout == "strided" and values.ndim:
        spread = np.full((*values.shape[:-1], 2 * values.shape[-1] + 1), 9).astype(values.dtype)
        view = spread[..., 1::2]
        view[...] = values
        return view
    if layout == "reversed" and values.ndim:
        return values[::-1].copy()[::-1]
    if layout == "unaligned":
        memory = np.zeros(values.nbytes + 1, np.uint8)[1:]
        view = memory.view(values.dtype).reshape(values.shape)
        view[...] = values
        return view
    copy = values.copy()
    copy.flags.writeable = layout != "read-only"
    return copy


def lend(array: Array, kind: str) -> Any:
    """Wrap an array as another library would."""
    if kind == "exported":
        return Exported(array)
    return memoryview(array) if kind == "memoryview" else array  # type: ignore[arg-type]


def any_call(comm: Communicator, words: dict[str, Any]) -> str:
    """Make a drawn call; say what was wrong with its result, if anything."""
    counts = words["counts"] and tuple(words["counts"])
    call = Drawn(**{**words, "shape": tuple(words["shape"]), "counts": counts})
    inputs = [_input(call, comm.size, member) for member in range(comm.size)]
    expected = _expected(call, inputs, comm.rank)
    x = lend(laid(inputs[comm.rank], call.layout), call.kind)
    given: dict[str, Any] = {} if call.op is None else {"op": call.op}
    if call.collective in ROOTED:
        given["root"] = call.root
    if call.counts is not None:
        given["counts"] = _counts(call, comm.size, comm.rank)
    target = None
    if call.into is not None and expected is not None:
        target = given["out"] = laid(np.full(expected.shape, 7).astype(call.dtype), call.into)
    takes = call.collective != "scatter" or comm.rank == call.root
    try:
        result = getattr(comm, call.collective)(x if takes else None, **given)
    except AllreduceError as error:  # the others go on, if the call is refused everywhere
        return f"{call}: {error}"
    if expected is None or result is None:
        return "" if expected is result else f"{call}: got {result}, not {expected}"
    if target is not None and result is not target:
        return f"{call}: the result is not out"
    got = np.asarray(result.array if isinstance(result, Exported) else result)
    same = got.shape == expected.shape and got.dtype == expected.dtype
    return "" if same and np.array_equal(got, expected) else f"{call}: got {got}, not {expected}"


def _counts(call: Drawn, size: int, member: int) -> tuple[int, ...] | None:
    """Return what a member passes: of all_to_all each has its own."""
    if call.counts is None or call.collective != "all_to_all":
        return call.counts
    return tuple(call.counts[(other + member) % size] for other in range(size))


def _input(call: Drawn, size: int, member: int) -> Array:
    """Return a member's input: small whole numbers."""
    shape = call.shape
    if call.counts is not None:
        rows = call.counts[member] if call.collective not in CUT else sum(call.counts)
        shape = (rows, *shape[1:])
    elif call.collective in CUT:
        shape = (shape[0] * size, *shape[1:])
    count = int(np.prod(shape))
    return ((np.arange(count) * 5 + member * 3) % 3).astype(call.dtype).reshape(shape)


def _expected(call: Drawn, inputs: list[Array], me: int) -> Array | None:
    size = len(inputs)
    if call.collective in ("reduce", "gather") and me != call.root:
        return None
    if call.collective == "broadcast":
        return inputs[call.root]
    if call.collective in ("all_gather", "gather"):
        return np.concatenate(inputs)
    if call.collective == "all_to_all":
        parts = [_shares(call, size, each, inputs[each])[me] for each in range(size)]
        return np.concatenate(parts)
    if call.collective == "scatter":
        return _shares(call, size, me, inputs[call.root])[me]
    assert call.op is not None, "the others reduce"
    total = inputs[0]
    for other in inputs[1:]:
        total = np.asarray(FOLDS[call.op](total, other)).astype(call.dtype)
    return _shares(call, size, me, total)[me] if call.collective == "reduce_scatter" else total


def _shares(call: Drawn, size: int, member: int, array: Array) -> list[Array]:
    """Cut an array as a member says."""
    counts = _counts(call, size, member)
    if counts is None:
        return np.split(array, size)
    return np.split(array, np.cumsum(counts)[:-1])
