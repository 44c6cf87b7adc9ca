"""Calls that would copy their arrays whole, cut into pieces that go one after the other.

All members cut alike, for what tells where is part of the call: lists of arrays, and factors before
a reduction. Each piece says the whole call, so that members that differ find out at the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from allreduce.comm import arguments, scaling
from allreduce.comm.arguments import prepare, room
from allreduce.comm.array import Array
from allreduce.comm.base import Work
from allreduce.comm.call import Call
from allreduce.comm.caller import Caller
from allreduce.comm.checks import UNSCALED, Context, Options
from allreduce.comm.spread import Spread
from allreduce.comm.stages import PIECE_BYTES, Stages

# There are two copies, one of which fills while the other goes: what is no longer than both is
# copied whole.
WHOLE_BYTES = 2 * PIECE_BYTES

Range = tuple[int, int]  # the first element, and what comes behind the last


@dataclass(frozen=True)
class Step:
    """Which elements a piece is made of, the same on all members but for what this one gets.

    Args:
        given: Ranges of the input.
        taken: The range of the output.
        counts: Elements of each member's share, where shares are cut.
    """

    given: tuple[Range, ...]
    taken: Range
    counts: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """The elements that go in."""
        return sum(high - low for low, high in self.given)


def of_whole(size: int, itemsize: int) -> Iterator[Step]:
    """Cut an array that is reduced, or told, as a whole."""
    most = PIECE_BYTES // itemsize
    for low in range(0, size, most):
        part = (low, min(size, low + most))
        yield Step((part,), part)


def of_shares(shares: Sequence[int], me: int, itemsize: int) -> Iterator[Step]:
    """Cut every member's share of an array into as many parts, of which one each is a piece."""
    number = -(-sum(shares) * itemsize // PIECE_BYTES)
    for k in range(number):
        cuts = [(count * k // number, count * (k + 1) // number) for count in shares]
        starts = [sum(shares[:member]) for member in range(len(shares))]
        given = [(at + low, at + high) for at, (low, high) in zip(starts, cuts, strict=True)]
        yield Step(tuple(given), cuts[me], tuple(high - low for low, high in cuts))


@dataclass(frozen=True)
class Piece:
    """A piece that is ready to go: flat arrays, and what is done when its result is there."""

    options: Options
    x: Array
    out: Array | None
    finish: Callable[[], None]


@dataclass(frozen=True)
class Cut:
    """Arrays of one dtype, and how they are cut.

    Args:
        dtype: Theirs.
        source: The input.
        target: The output; None where none goes.
        steps: The pieces.
        reads: Whether this member's input matters.
        fresh: Whether the output is new memory, where pieces may lie before members agree.
        as_it_lies: Whether pieces of the input may go without a copy. Otherwise none does, wherever
            it lies: all members have to pass symmetric memory, or none.
    """

    dtype: np.dtype[Any]
    source: Spread
    target: Spread | None
    steps: Sequence[Step]
    reads: bool = True
    fresh: bool = False
    as_it_lies: bool = False

    def pieces(self, context: Context, options: Options) -> Iterator[Piece]:
        """Yield the pieces; each has its copy until the one after the next is asked for."""
        (before, after), plain = options.scale, replace(options, scale=UNSCALED)
        copies, shares = self._rooms(context)
        for number, step in enumerate(self.steps):
            copy, whole = copies[number % 2][: step.count], step.counts is None
            low, high = step.taken
            out = None if self.target is None else self.target.run(low, high)
            lies = out is not None
            if out is None and self.target is not None:
                out = copy if whole else shares[number % 2][: high - low]
            into = out if lies and whole and self.fresh else copy
            x = self._input(step, before, copy if into is None else into)
            finish = partial(self._finish, step, after, out, lies)
            yield Piece(replace(plain, counts=step.counts), x, out, finish)

    def _rooms(self, context: Context) -> tuple[list[Array], list[Array]]:
        """Return memory for two pieces, and for two shares that cannot go where they belong.

        All of it before the first piece goes: who finds none then has not begun the call, and may
        make another instead.
        """
        copy = max((step.count for step in self.steps), default=0)
        lie = self.target is None or self.target.run(0, self.target.size) is not None
        taken = [step.taken for step in self.steps if step.counts is not None and not lie]
        share = max((high - low for low, high in taken), default=0)  # an empty one lies nowhere
        copies, shares = (
            [room(context, (most,), self.dtype) for _ in self.steps[:2]] for most in (copy, share)
        )
        return copies, shares

    def _input(self, step: Step, factor: Any, copy: Array) -> Array:
        if self.as_it_lies and factor == 1:
            (given,) = step.given
            lies = self.source.run(*given)
            if lies is not None:
                return lies
        at = 0
        for low, high in step.given if self.reads else ():
            self.source.read(low, high, factor, copy[at : at + high - low])
            at += high - low
        return copy

    def _finish(self, step: Step, factor: Any, out: Array | None, lies: bool) -> None:
        """Put a piece's result where it belongs."""
        if out is None or self.target is None:
            return
        if not lies:
            self.target.write(*step.taken, factor, out)
        elif factor != 1:
            scaling.apply(out, factor, out)


def stages(
    comm: Caller, context: Context, options: Options, cuts: Sequence[Cut], result: Callable[[], Any]
) -> Stages:
    """Make the calls of all pieces, two of which are under way at a time."""
    under_way: tuple[Work, Piece] | None = None
    for cut in cuts:
        for piece in cut.pieces(context, options):
            work = comm._stage(context.collective, piece.x, piece.options, piece.out)
            if under_way is not None:
                yield under_way[0]
                under_way[1].finish()
            under_way = work, piece
    assert under_way is not None, "there is something to cut"
    work, last = under_way

    def finish(_: Any) -> Any:
        last.finish()
        return result()

    return work, finish


def start(
    comm: Caller, collective: str, x: Any, options: Options, out: Any, async_op: bool
) -> Work:
    """Start a reduction with factors; in pieces if it is a large one, with one before it."""
    context = comm._context(collective)
    given = arguments.read(context, x, options, out)
    lent, plain, call, target, answer = given
    assert lent is not None, "a reduction has an input"
    if plain.scale[0] == 1 or lent.array.nbytes <= WHOLE_BYTES:
        return comm._start_ready(context, prepare(context, x, options, out, given=given))
    cut = of_scaled(context, lent.array, target, call, out is None)
    made = stages(
        *(comm, context, replace(plain, typed=call.typed), [cut]),
        lambda: None if target is None else answer(target),
    )
    return comm._queued(context, made, async_op)


def of_scaled(context: Context, x: Array, target: Array | None, call: Call, fresh: bool) -> Cut:
    """Cut a reduction of one array that is multiplied first; `fresh` says if the target is new."""
    if call.collective == "reduce_scatter":
        shares = call.counts or (call.count,) * context.size
        steps = of_shares(shares, context.rank, x.itemsize)
    else:
        steps = of_whole(x.size, x.itemsize)
    into = None if target is None else Spread([target])
    return Cut(x.dtype, Spread([x]), into, tuple(steps), fresh=fresh)
