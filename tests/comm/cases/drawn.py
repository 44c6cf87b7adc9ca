"""Calls that hypothesis draws: any shape, strides, counts and kind of array, on all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.comm.arguments.arrays import dtype_named
from allreduce.errors import AllreduceError
from tests.comm.cases.collective_cases import Array
from tests.comm.cases.exchanges import Exported
from tests.comm.cases.operator_cases import exact, fold

LAYOUTS = ("plain", "fortran", "strided", "reversed", "unaligned", "read-only")
LIBRARIES = tuple(name for name in ("torch", "jax") if find_spec(name) is not None)
KINDS = ("numpy", "memoryview", "exported", *LIBRARIES)
ROOTED = ("reduce", "gather", "scatter", "broadcast")
CUT = ("reduce_scatter", "scatter", "all_to_all")
WHOLE = ("all_reduce", "reduce", "broadcast")  # these take lists, too


@dataclass(frozen=True)
class Drawn:
    """One call, as all ranks make it.

    Args:
        collective: Its name, or "message" for a ring of sends.
        op: Its operator, if it has one.
        dtype: The array's dtype.
        shape: The input's shape; with `counts` all rows together, otherwise the rows of one share.
        counts: Rows of each rank, or None.
        root: Its root, if it has one; of a message how far it goes, which is its tag, too.
        layout: The memory layout of inputs, one of `LAYOUTS`.
        kind: The array library of inputs, one of `KINDS`.
        into: The memory layout of `out`, or None for a new output.
        items: Types and shapes of the arrays that follow in a list, if it is one.
        scale: Factors before and after a sum or mean.
        started: Whether it is started first, and waited for then.
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
    items: tuple[tuple[str, tuple[int, ...]], ...] = ()
    scale: tuple[float, float] = (1.0, 1.0)
    started: bool = False


def of_words(words: dict[str, Any]) -> Drawn:
    """Return a call from what JSON has made of it."""
    counts = words["counts"] and tuple(words["counts"])
    items = tuple((dtype, tuple(shape)) for dtype, shape in words["items"])
    own = {"shape": tuple(words["shape"]), "counts": counts, "scale": tuple(words["scale"])}
    return Drawn(**{**words, **own, "items": items})


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
    """Wrap an array as another library would, where that can."""
    if kind == "jax":
        jax = import_module("jax")
        jax.config.update("jax_enable_x64", True)
        return jax.numpy.asarray(array)
    narrow = array.dtype == dtype_named("bfloat16")  # unknown to the buffer protocol and DLPack
    if kind == "torch":
        plain = all(step > 0 for step in array.strides) and array.flags.writeable
        torch, array = import_module("torch"), array if plain else array.copy()
        tensor = torch.from_numpy(array.view(np.int16) if narrow else array)
        return tensor.view(torch.bfloat16) if narrow else tensor
    if kind == "exported" and not narrow:
        return Exported(array)
    return memoryview(array) if kind == "memoryview" and not narrow else array  # type: ignore[arg-type]


def read(array: Any) -> Array:
    """Return what `lend` may have made as NumPy's."""
    if isinstance(array, Exported):
        return array.array
    if (
        "bfloat16" in str(array.dtype)
        and not isinstance(array, np.ndarray)
        and "torch" in LIBRARIES
    ):
        torch = import_module("torch")
        if isinstance(array, torch.Tensor):
            return np.asarray(array.view(torch.int16)).view(dtype_named("bfloat16"))
    return np.asarray(array)


def any_call(comm: Communicator, words: dict[str, Any]) -> str:
    """Make a drawn call; describe the error in its result, if any."""
    call = of_words(words)
    inputs = [_inputs(call, comm.size, member) for member in range(comm.size)]
    expected = [_expected(call, list(arrays), comm.rank) for arrays in zip(*inputs, strict=True)]
    x = [lend(laid(array, call.layout), call.kind) for array in inputs[comm.rank]]
    targets = None
    if expected[0] is not None and (call.into is not None or call.collective == "message"):
        targets = [laid(np.ones_like(array), call.into or "plain") for array in expected]
    try:
        results = _made(comm, call, x, targets)
    except AllreduceError as error:  # the others go on, if the call is refused everywhere
        return f"{call}: {error}"
    for number, wanted in enumerate(expected):
        result = None if results is None else results[number]
        if targets is not None and result is not targets[number]:
            return f"{call}: result {number} is not out"
        if wrong := _wrong(call, x[number], result, wanted, targets is not None):
            return f"{call}: of result {number}, {wrong}"
    return ""


def _made(comm: Communicator, call: Drawn, x: list[Any], targets: list[Array] | None) -> Any:
    """Make the call; returns the list of its results, or None."""
    listed = bool(call.items)
    given: dict[str, Any] = {} if call.op is None else {"op": call.op}
    if call.scale != (1.0, 1.0):
        given |= {"prescale": call.scale[0], "postscale": call.scale[1]}
    if call.collective in ROOTED:
        given["root"] = call.root
    if call.counts is not None:
        given["counts"] = _counts(call, comm.size, comm.rank)
    if targets is not None:
        given["out"] = targets if listed else targets[0]
    if call.collective == "message":
        to, source = (comm.rank + call.root) % comm.size, (comm.rank - call.root) % comm.size
        sent = comm.send(x[0], to, call.root, async_op=True)
        result = comm.recv(given["out"], source, call.root, async_op=call.started)
        result = result.wait() if call.started else result
        sent.wait()
        return [result]
    takes = call.collective != "scatter" or comm.rank == call.root
    mine = (x if listed else x[0]) if takes else None
    compound = call.collective == "scatter" and targets is None
    compound = compound or (call.collective == "all_to_all" and call.counts is not None)
    started = call.started and not compound
    result = getattr(comm, call.collective)(mine, async_op=started, **given)
    result = result.wait() if started else result
    return result if listed or result is None else [result]


def _wrong(call: Drawn, x: Any, result: Any, wanted: Array | None, filled: bool) -> str:
    """Describe the error in a result."""
    if wanted is None or result is None:
        return "" if wanted is result else f"got {result}, not {wanted}"
    given = np.ndarray if isinstance(x, memoryview) or call.collective == "scatter" else type(x)
    if not filled and not isinstance(result, (given, type(x))):
        return f"got {type(result)}, but gave {type(x)}"
    got = read(result)
    same = got.shape == wanted.shape and got.dtype == wanted.dtype
    return "" if same and np.array_equal(got, wanted) else f"got {got}, not {wanted}"


def _counts(call: Drawn, size: int, member: int) -> tuple[int, ...] | None:
    """Return a member's input: in all_to_all each has its own."""
    if call.counts is None or call.collective != "all_to_all":
        return call.counts
    return tuple(call.counts[(other + member) % size] for other in range(size))


def _inputs(call: Drawn, size: int, member: int) -> list[Array]:
    """Return a member's arrays, which any order combines to the same."""
    shape = call.shape
    if call.counts is not None:
        rows = call.counts[member] if call.collective not in CUT else sum(call.counts)
        shape = (rows, *shape[1:])
    elif call.collective in CUT:
        shape = (shape[0] * size, *shape[1:])
    arrays = ((call.dtype, shape), *call.items)
    return [
        exact(dtype, member + place, int(np.prod(own))).reshape(own)
        for place, (dtype, own) in enumerate(arrays)
    ]


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
    if call.collective == "message":
        return inputs[(me - call.root) % size]
    assert call.op is not None, "the others reduce"
    before, after = (np.array(factor).astype(inputs[0].dtype) for factor in call.scale)
    scaled = call.scale != (1.0, 1.0)  # powers of two: exact wherever they come
    total = fold(call.op, [array * before for array in inputs] if scaled else inputs)
    total = total * after if scaled else total
    return _shares(call, size, me, total)[me] if call.collective == "reduce_scatter" else total


def _shares(call: Drawn, size: int, member: int, array: Array) -> list[Array]:
    """Cut an array as a member says."""
    counts = _counts(call, size, member)
    if counts is None:
        return np.split(array, size)
    return np.split(array, np.cumsum(counts)[:-1])
