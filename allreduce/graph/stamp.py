"""Ranks make sure in every step that they do alike: by bits that are summed with the gradients.

An arena's header has room beside the number of samples. Each replica puts bits of a digest there,
of the step's program and the optimizer's settings. If all have the same, each bit's sum is 0 or the
number of replicas; otherwise some sum lies in between, on all replicas, and all raise before
anything is updated. So the check takes no message of its own, and finds a learning rate that only
one rank has changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from itertools import zip_longest
from typing import Any

import numpy as np

from allreduce.comm import Communicator, exchange_plain, world
from allreduce.errors import MismatchError, NumericsError, everywhere
from allreduce.graph.outline import Outline, difference, own_part
from allreduce.graph.update import UpdateRule
from allreduce.reduction import Arena, Layout

_DIGEST_BYTES = 64  # blake2b's most; a few bits of it fit into one step, others into the next


class Stamp:
    """One replica's bits of one optimizer in one program.

    Args:
        program: What the step does.
        rule: The optimizer.
        layout: Where its variables lie.
        place: Where the bits go: what is free of the arena's header.
        communicator: Has one member per replica.
    """

    def __init__(
        self,
        program: Outline,
        rule: UpdateRule,
        layout: Layout,
        place: np.ndarray,
        communicator: Communicator,
    ) -> None:
        self._program = program
        self._rule = rule
        self._order = [own_part(span.name) for span in layout.spans]
        self._place = place
        self._communicator = communicator
        self._steps = _DIGEST_BYTES * 8 // place.size  # how many a digest's bits last for
        self._settings: dict[str, Any] | None = None
        self._period = -1
        self._rows: list[tuple[np.ndarray, bytes]] = []  # for each of them: the bits, their sums
        self.sums = b""  # what all bits have to add up to in this step
        self._iterations = 0

    def put(self, iterations: int) -> None:
        """Put this step's bits into the header, before it is reduced."""
        settings = self._rule.get_config()
        period, step = divmod(iterations, self._steps)
        if period != self._period or settings != self._settings:
            self._draw(settings, period)
        self._iterations = iterations
        bits, self.sums = self._rows[step]
        self._place[...] = bits

    def check(self) -> None:
        """Look at what became of the bits.

        Raises:
            MismatchError: Ranks run different programs, or have different settings; on all of them.
        """
        if self._place.tobytes() != self.sums:
            raise self._difference()

    def _draw(self, settings: dict[str, Any], period: int) -> None:
        self._settings, self._period = settings, period
        words = [line for line, _ in self._program]
        text = json.dumps([words, self._shown(), self._order, period]).encode()
        digest = np.frombuffer(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), np.uint8)
        bits = np.unpackbits(digest)[: self._steps * self._place.size]
        rows = bits.reshape(self._steps, -1).astype(self._place.dtype)
        sums = (rows * self._communicator.size).astype(self._place.dtype)
        self._rows = [(row, sum_.tobytes()) for row, sum_ in zip(rows, sums, strict=True)]

    def _shown(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in (self._settings or {}).items())
        return f"{type(self._rule).__name__}({values})"

    def _difference(self) -> MismatchError:
        """Have all members tell what they do; say where two of them differ first."""
        here = world().rank
        mine = [here, self._shown(), self._iterations, self._order, self._program]
        told = exchange_plain(self._communicator, "what ranks do in a step", mine)
        first = told[0]
        other = next((each for each in told if each[1:] != first[1:]), first)
        return everywhere(MismatchError(f"rank {here}: {_said(*first, *other)}"))


def begin_update(arena: Arena, stamp: Stamp | None, leads: bool) -> None:
    """Make sure, before an update changes anything, that it is one; the first of a step counts.

    Args:
        arena: Whose variables it changes.
        stamp: What tells whether all ranks do alike; None where another update has looked.
        leads: Whether it is the first of the step.

    Raises:
        MismatchError: Ranks do not.
        NumericsError: The number of samples is none; all replicas have the same sum.
    """
    if stamp is not None:
        stamp.check()
    if not leads:
        return
    count = float(arena.count[0])
    if not 0 <= count < math.inf:
        message = f"the weights of all replicas add up to {count}; expected a finite number from 0"
        remedy = "check the weight given to minimize or apply"
        raise everywhere(NumericsError(f"{message} up: {remedy}"))
    arena.iterations += 1


def _said(
    rank: int,
    optimizer: str,
    iterations: int,
    order: list[str],
    program: list[list[str]],
    other_rank: int,
    other_optimizer: str,
    other_iterations: int,
    other_order: list[str],
    other_program: list[list[str]],
) -> str:
    """Say where two ranks differ first."""

    def differ(what: str, mine: str, theirs: str, remedy: str) -> str:
        return f"{what} {mine} on rank {rank} but {theirs} on rank {other_rank}; {remedy}"

    found = difference(rank, program, other_rank, other_program)
    if found is not None:
        return found
    if optimizer != other_optimizer:
        remedy = "give it the same settings on every rank, and change them on all"
        return differ("the optimizer is", optimizer, other_optimizer, remedy)
    pairs = zip_longest(order, other_order, fillvalue="none")
    for place, (name, other_name) in enumerate(pairs):
        if name != other_name:
            what = f"by the optimizer's first step, its variable {place} is"
            remedy = "make the optimizer anew, and let its first step be the same on every rank"
            return differ(what, repr(name), repr(other_name), remedy)
    return differ(
        "the optimizer has done",
        f"{iterations} steps",
        str(other_iterations),
        "load its state on every rank",
    )
