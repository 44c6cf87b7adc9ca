"""Lists of arrays: each large array is one call, small ones are packed by dtype."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from allreduce.cluster import SilentError
from allreduce.comm.arguments import call_text, checks, scaling
from allreduce.comm.arguments.arrays import BorrowedArray, borrow, borrow_out
from allreduce.comm.arguments.checks import UNSCALED, Context, Options
from allreduce.comm.arguments.device_arrays import check_list, device_of
from allreduce.comm.arguments.overlap import check_apart
from allreduce.comm.arguments.prepare import Prepared, new_output, prepare
from allreduce.comm.calls.call import ROOTED, WHOLE, Array
from allreduce.comm.core.work import Work
from allreduce.comm.dispatch import Dispatcher
from allreduce.devices import Device
from allreduce.errors import AllreduceError, MismatchError, UsageError, reworded

# An array of this size or more is not packed. One more call takes about 20 us, and the latency of
# its transport; packing and unpacking 256 KiB takes 12 us in the cache, and 85 us in a list of 128
# MiB.
ALONE_BYTES = 256 << 10
_LIST_SECONDS = 0.5  # for a member that disagrees to publish its list
_POLL_SECONDS = 0.2  # besides, for the store to answer


@dataclass(frozen=True)
class Request:
    """A checked call of a list.

    Args:
        targets: The same as NumPy arrays; None if the results are new arrays.
        gets: Whether this member gets the results.
        options: The call's, in plain numbers, with the text that must be equal on all members.
        bundles: The items of each call. One item goes as it lies, several are packed.
    """

    borrowed: list[BorrowedArray]
    out: Any
    targets: list[Array] | None
    gets: bool
    options: Options
    bundles: list[list[int]]

    @property
    def arrays(self) -> list[Array]:
        """The items as NumPy arrays."""
        return [one.array for one in self.borrowed]


class ListWork(Work):
    """The works that carry one list."""

    def __init__(
        self, comm: Dispatcher, where: str, request: Request, works: Sequence[Work]
    ) -> None:
        self.where = where
        self._comm, self._request, self._works = comm, request, works

    @property
    def settled(self) -> bool:
        return all(work.settled for work in self._works)

    def done(self) -> bool:
        with _item_named(self._comm, self._request):
            waiting = [work for work in self._works if not work.done()]  # each is driven
        return not waiting

    def finish(self, timeout: float | None) -> Any:
        start = time.monotonic()
        results = []
        with _item_named(self._comm, self._request):
            for work in self._works:
                spent = time.monotonic() - start
                results.append(work.wait(None if timeout is None else max(0.0, timeout - spent)))
        return _answer(self._request, results)


def start(comm: Dispatcher, collective: str, x: Sequence[Any], options: Options, out: Any) -> Work:
    """Start a collective on a list of arrays.

    Args:
        collective: One whose result has the shape of its input.
        x: The arrays; in number, shapes and dtypes the same on all members.
        out: As many arrays for the results, or None for new ones.
    """
    context = comm.context(collective)
    device = device_of(context, *x, *(out if isinstance(out, list | tuple) else ()))
    if device is not None:
        return _start_on_device(comm, context, device, x, options, out)
    request = read(context, x, options, out)
    ready = _prepare(context, request)
    with _item_named(comm, request):
        works = comm.exclusively(lambda: [comm.start_prepared(context, each) for each in ready])
        if not works:  # the members still have to agree
            works = [comm.meet(request.options.call_text)]
    return ListWork(comm, context.where, request, works)


def _start_on_device(
    comm: Dispatcher, context: Context, device: Device, x: Sequence[Any], options: Options, out: Any
) -> Work:
    """Start a collective on arrays of a device, as one call of the transport."""
    _check_collective(context)
    if out is not None:
        checks.check_outs(context, out, len(x))
    calls = [
        comm.prepare_on_device(
            context._replace(item=f"item {i} of the list"), device, each, options, out and out[i]
        )
        for i, each in enumerate(x)
    ]
    if out is not None:
        check_list(context, device, calls)
    gets = context.collective != "reduce" or context.rank == calls[0].call.root

    def result() -> Any:
        results = [each.result() for each in calls]
        return (results if out is None else out) if gets else None

    transport = comm.device_transport(context, device)
    return comm.in_order(context, partial(transport.start_list_on_device, calls, result))


@contextlib.contextmanager
def _item_named(comm: Dispatcher, request: Request) -> Iterator[None]:
    """Add the first item that differs to a mismatch, as the texts of long calls do not show it.

    Every member publishes its list in the store, and reads the lists of the two that disagree.
    """
    try:
        yield
    except MismatchError as error:
        if not error.lists:
            raise
        own = json.dumps([call_text.array_text(each.dtype, each.shape) for each in request.arrays])
        found: list[list[str]] = []
        with contextlib.suppress(AllreduceError, SilentError):  # the mismatch is raised instead
            comm.store.post(f"lists/{comm.rank}", own.encode())
            for rank, _ in error.lists:
                data = comm.store.try_get(f"lists/{rank}", _POLL_SECONDS, _LIST_SECONDS)
                found.append(json.loads(data or "[]"))
        if len(found) < len(error.lists):
            raise
        for i, (first, second) in enumerate(zip(*found, strict=False)):
            if first != second:
                one, other = (whose for _, whose in error.lists)
                text = f"{error} (item {i} is {first} {one} and {second} {other})"
                raise reworded(error, text) from None
        raise


def read(context: Context, x: Sequence[Any], options: Options, out: Any) -> Request:
    """Check a call of a list: each item as if it were passed alone."""
    _check_collective(context)
    borrowed = [_borrow(context, i, one, options) for i, one in enumerate(x)]
    arrays = [one.array for one in borrowed]
    targets = None if out is None else _targets(context, borrowed, out)
    if targets is not None:
        check_apart(context.where, arrays, targets)
    options = _checked(context, arrays, options)
    gets = context.collective != "reduce" or context.rank == options.root
    return Request(borrowed, out, targets, gets, options, _bundles(arrays))


def _check_collective(context: Context) -> None:
    if context.collective not in WHOLE:
        raise UsageError(
            f"{context.where} takes one array, not a list; lists go to {', '.join(WHOLE)}"
        )


def _bundles(arrays: Sequence[Array]) -> list[list[int]]:
    """Return the items of each call; the same on all members, whose shapes and dtypes agree."""
    found: dict[tuple[np.dtype[Any], int], list[int]] = {}
    for i, array in enumerate(arrays):
        alone = array.nbytes >= ALONE_BYTES
        found.setdefault((array.dtype, i if alone else -1), []).append(i)
    return list(found.values())


def _prepare(context: Context, request: Request) -> list[Prepared]:
    """Make the calls ready, with all copies: once the first starts, outputs may be written."""
    arrays, targets, options = _inputs(context, request), request.targets, request.options
    before, after = options.scale
    ready = []
    for items in request.bundles:
        if len(items) == 1:
            target = None if targets is None else targets[items[0]]
            ready.append(prepare(context, arrays[items[0]], options, target))
            continue
        packed = [arrays[i] for i in items]
        flat = new_output(context, (sum(each.size for each in packed),), packed[0].dtype)
        np.concatenate(packed, axis=None, out=flat)
        if before != 1:
            scaling.apply(flat, before, flat)
        ready.append(prepare(context, flat, replace(options, scale=(1.0, after)), flat))
    return ready


def _inputs(context: Context, request: Request) -> list[Array]:
    """Return the items, with copies of those that are the output of another item."""
    arrays = request.arrays
    outputs = {each.ctypes.data: i for i, each in enumerate(request.targets or ()) if each.size}
    for i, array in enumerate(arrays) if outputs else ():
        if array.size and outputs.get(array.ctypes.data, i) != i:
            arrays[i] = new_output(context, array.shape, array.dtype)
            arrays[i][...] = array
    return arrays


def _answer(request: Request, results: Sequence[Any]) -> Any:
    """Return the caller's results; copy packed ones to their outputs."""
    if not request.gets:
        return None
    found: list[Any] = [None] * len(request.borrowed)
    for items, result in zip(request.bundles, results, strict=bool(request.borrowed)):
        low = 0
        for i in items:
            array, found[i] = request.borrowed[i].array, result
            if len(items) > 1:
                found[i] = result[low : low + array.size].reshape(array.shape)
                low += array.size
                if request.targets is not None:
                    request.targets[i][...] = found[i]
    if request.out is not None:
        return request.out
    return [one.answer(result) for one, result in zip(request.borrowed, found, strict=True)]


def _checked(context: Context, arrays: Sequence[Array], options: Options) -> Options:
    """Return the options in plain numbers, with the text that must be equal on all members."""
    if context.collective in ROOTED:
        options = replace(options, root=checks.check_root(context, options.root))
    if options.scale is not UNSCALED:
        for array in arrays:
            factors = scaling.check_factors(context, options.scale, options.op, array.dtype)
            options = replace(options, scale=factors)
    return replace(options, call_text=call_text.of_list(context, arrays, options))


def _borrow(context: Context, i: int, x: Any, options: Options) -> BorrowedArray:
    """View an item of the list, with the checks that it would get alone."""
    item = context._replace(item=f"item {i} of the list")
    borrowed = borrow(item.where, x)
    checks.check_op(item, options.op, borrowed.array.dtype)
    checks.check_number(item, x, options.op)
    return borrowed


def _targets(context: Context, borrowed: Sequence[BorrowedArray], out: Any) -> list[Array]:
    checks.check_outs(context, out, len(borrowed))
    names = [f"{context.where}: item {i} of out" for i in range(len(borrowed))]
    targets = [borrow_out(name, one) for name, one in zip(names, out, strict=True)]
    for name, one, target in zip(names, borrowed, targets, strict=True):
        checks.check_out(name, target, one.array.shape, one.array.dtype)
    return targets
