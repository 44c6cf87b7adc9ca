"""A list of arrays as one call: packed by dtype, in pieces if it is long, and handed back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from allreduce.comm import checks, pieces, scaling, typed
from allreduce.comm.arguments import room
from allreduce.comm.array import Array
from allreduce.comm.arrays import Lent, borrow, borrow_out
from allreduce.comm.base import Work
from allreduce.comm.call import ROOTED
from allreduce.comm.caller import Caller
from allreduce.comm.checks import UNSCALED, Context, Options
from allreduce.comm.overlap import check_apart
from allreduce.comm.pieces import Cut, Step, of_whole
from allreduce.comm.spread import Spread
from allreduce.errors import ShapeError, UsageError


class ListWork(Work):
    """The works that carry one list."""

    def __init__(
        self, where: str, works: Sequence[Work], unpack: Callable[[Sequence[Any]], Any]
    ) -> None:
        self.where = where
        self._works = works
        self._unpack = unpack

    @property
    def settled(self) -> bool:
        return all(work.settled for work in self._works)

    def done(self) -> bool:
        waiting = [work for work in self._works if not work.done()]  # each is driven
        return not waiting

    def finish(self, timeout: float | None) -> Any:
        start = time.monotonic()
        flats = []
        for work in self._works:
            spent = time.monotonic() - start
            flats.append(work.wait(None if timeout is None else max(0.0, timeout - spent)))
        return self._unpack(flats)


def start(
    comm: Caller, collective: str, x: Sequence[Any], options: Options, out: Any, async_op: bool
) -> Work:
    """Start a collective on a list of arrays.

    Args:
        comm: Where it starts.
        collective: One whose result is shaped as its input.
        x: The arrays; in number, shapes and dtypes the same on all members.
        options: The call's.
        out: As many arrays for the results, or None for new ones.
        async_op: Whether it goes on by itself.
    """
    context = comm._context(collective)
    request = read(context, x, options, out)
    gets = collective != "reduce" or comm.rank == request.options.root

    def result() -> Any:
        if not gets:
            return None
        pairs = zip(request.lent, request.targets, strict=True)
        return [one.answer(target) for one, target in pairs] if out is None else out

    if not request.large:
        return _start_whole(comm, context, request, result)
    cut = cuts(context, request)
    made = pieces.stages(comm, context, request.options, cut, result)
    return comm._queued(context, made, async_op)


def cuts(context: Context, request: Request) -> list[Cut]:
    """Cut a large list into pieces, dtype by dtype."""
    options, targets = request.options, request.targets
    arrays = _kept(context, request)
    gets = context.collective != "reduce" or context.rank == options.root
    reads = context.collective != "broadcast" or context.rank == options.root
    made = []
    for bundle in request.bundles:
        source, target = (Spread([each[i] for i in bundle.items]) for each in (arrays, targets))
        dtype = arrays[bundle.items[0]].dtype
        whole = [Step(((0, source.size),), (0, source.size))] * bool(source.size)
        steps = of_whole(source.size, dtype.itemsize) if request.cuts(bundle) else whole
        into = target if gets else None
        how = (reads, request.fresh, not bundle.packed)
        made.append(Cut(dtype, source, into, tuple(steps), *how))
    return made


def _kept(context: Context, request: Request) -> list[Array]:
    """Return the inputs, with copies of those over which an earlier item's output is written."""
    order = [i for bundle in request.bundles for i in bundle.items]
    arrays, written = request.arrays, set[int]()
    for i in order:
        if arrays[i].ctypes.data in written:
            arrays[i] = room(context, arrays[i].shape, arrays[i].dtype)
            arrays[i][...] = request.lent[i].array
        if arrays[i].size:
            written.add(request.targets[i].ctypes.data)
    return arrays


def _start_whole(
    comm: Caller, context: Context, request: Request, result: Callable[[], Any]
) -> ListWork:
    """Start one call per dtype that occurs."""
    collective = context.collective
    arrays, targets, options = request.arrays, request.targets, request.options
    flats: list[tuple[Array, Array]] = []
    for bundle in request.bundles:
        if bundle.packed:
            flat = _pack(context, [arrays[i] for i in bundle.items])
            flats.append((flat, flat))
        else:
            (i,) = bundle.items  # flat, as it is on members whose `out` has it packed
            into = targets[i].reshape(-1)
            if request.fresh and not arrays[i].flags.c_contiguous:
                targets[i][...] = arrays[i]
                flats.append((into, into))
            else:
                flats.append((arrays[i].reshape(-1), into))
    with comm._together() if len(flats) > 1 else contextlib.nullcontext():
        works = [comm._start(collective, x, options, into) for x, into in flats]
    if not request.lent:  # which all members have to agree on
        works.append(comm._meet(options.typed))

    def unpack(flats: Sequence[Any]) -> Any:
        for bundle, flat in zip(request.bundles, flats, strict=bool(request.lent)):
            if flat is not None:  # of a reduce, where it goes to another
                bundle.unpack(flat, targets)
        return result()

    return ListWork(context.where, works, unpack)


@dataclass(frozen=True)
class Bundle:
    """Items of a list that go as one call: alone and in their place, or packed."""

    items: list[int]
    packed: bool

    def unpack(self, flat: Any, targets: Sequence[Array]) -> None:
        """Put what has come where it belongs."""
        low = 0
        for i in self.items if self.packed else ():
            target = targets[i]
            target[...] = flat[low : low + target.size].reshape(target.shape)
            low += target.size


@dataclass(frozen=True)
class Request:
    """A checked call of a list.

    Args:
        lent: Its items.
        targets: Where their results go.
        options: The call's, in plain numbers, with what the caller wrote, which has to agree.
        bundles: What goes as one call.
        fresh: Whether the results' places are new memory.
    """

    lent: list[Lent]
    targets: list[Array]
    options: Options
    bundles: list[Bundle]
    fresh: bool

    @property
    def arrays(self) -> list[Array]:
        """Its items as NumPy sees them."""
        return [one.array for one in self.lent]

    @property
    def large(self) -> bool:
        """Whether it is cut into pieces; all members say the same."""
        cut = [i for bundle in self.bundles if self.cuts(bundle) for i in bundle.items]
        return sum(self.lent[i].array.nbytes for i in cut) > pieces.WHOLE_BYTES

    def cuts(self, bundle: Bundle) -> bool:
        """Say whether a large list's bundle is cut; a dtype's only array goes as it would alone."""
        return len(bundle.items) > 1 or self.options.scale[0] != 1


def read(context: Context, x: Sequence[Any], options: Options, out: Any) -> Request:
    """Check a call of a list: each item is refused as it would be alone."""
    if context.collective not in checks.WHOLE:
        raise UsageError(
            f"{context.where} takes one array, not a list; lists go to {', '.join(checks.WHOLE)}"
        )
    lent = [_borrow(context, i, one, options) for i, one in enumerate(x)]
    targets = _targets(context, lent, out)
    arrays = [one.array for one in lent]
    if out is not None:
        check_apart(context.where, arrays, targets)
    options = _checked(context, arrays, options)
    return Request(lent, targets, options, _bundles(arrays, targets), out is None)


def _bundles(arrays: Sequence[Array], targets: Sequence[Array]) -> list[Bundle]:
    """Sort a list's items by dtype; one alone goes without packing, where nothing keeps it."""
    bundles = []
    for items in _by_dtype(arrays):
        first, more = targets[items[0]], items[1:]
        # What is another item's input is written when all have been read.
        others = (array for i, array in enumerate(arrays) if i != items[0])
        kept = any(array.ctypes.data == first.ctypes.data for array in others)
        bundles.append(Bundle(items, bool(more) or kept or not first.flags.c_contiguous))
    return bundles


def _by_dtype(arrays: Sequence[Array]) -> list[list[int]]:
    """Sort positions by their arrays' dtypes, each of which gets a call."""
    found: dict[np.dtype[Any], list[int]] = {}
    for i, array in enumerate(arrays):
        found.setdefault(array.dtype, []).append(i)
    return list(found.values())


def _checked(context: Context, arrays: Sequence[Array], options: Options) -> Options:
    """Return the options in plain numbers, with what the caller wrote, which has to agree."""
    if context.collective in ROOTED:
        options = replace(options, root=checks.check_root(context, options.root))
    if options.scale is not UNSCALED:
        for array in arrays:
            factors = scaling.check_factors(context, options.scale, options.op, array.dtype)
            options = replace(options, scale=factors)
    return replace(options, typed=typed.of_list(context, arrays, options))


def _borrow(context: Context, i: int, x: Any, options: Options) -> Lent:
    """View an item of the list, which is refused as it would be alone."""
    item = context._replace(item=f"item {i} of the list")
    lent = borrow(item.where, x)
    checks.check_op(item, options.op, lent.array.dtype)
    checks.check_number(item, x, options.op)
    return lent


def _pack(context: Context, arrays: Sequence[Array]) -> Array:
    flat = room(context, (sum(array.size for array in arrays),), arrays[0].dtype)
    return np.concatenate(arrays, axis=None, out=flat)


def _targets(context: Context, lent: Sequence[Lent], out: Any) -> list[Array]:
    where = context.where
    if out is None:
        return [room(context, one.array.shape, one.array.dtype) for one in lent]
    if not isinstance(out, list | tuple) or len(out) != len(lent):
        listed = isinstance(out, list | tuple)
        got = f"has {len(out)}" if listed else f"is {type(out).__name__}"
        raise UsageError(f"{where}: out must be a list of {len(lent)} arrays, but {got}")
    targets = [borrow_out(f"{where}: item {i} of out", one) for i, one in enumerate(out)]
    for i, (one, target) in enumerate(zip(lent, targets, strict=True)):
        if (target.shape, target.dtype) != (one.array.shape, one.array.dtype):
            raise ShapeError(
                f"{where}: item {i} of out must have shape {one.array.shape} and dtype "
                f"{one.array.dtype}, but has {target.shape} and {target.dtype}"
            )
        if not target.flags.writeable:
            raise UsageError(f"{where}: item {i} of out is read-only; pass a writable array")
    return targets
