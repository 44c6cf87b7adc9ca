"""Ranks make sure in every step that they do alike: by bits that are summed with the gradients.

An arena's header has room beside the number of samples. Each replica puts bits of a digest there,
of the step's program, the optimizer's settings, and what else all ranks bring alike. If all have
the same, each bit's sum is 0 or the number of replicas; otherwise some sum lies in between, on all
replicas, and all raise before anything is updated. So the check takes no message of its own, and
finds a learning rate that only one rank has changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np

from allreduce.comm import Communicator, exchange_plain, world
from allreduce.errors import MismatchError, NumericsError, everywhere
from allreduce.graph import fingerprint
from allreduce.graph.fingerprint import Fingerprint
from allreduce.graph.naming import own_part
from allreduce.graph.outline import Outline, difference
from allreduce.graph.update import UpdateRule
from allreduce.reduction import Arena, Layout

_UNTOLD = "ranks do not do the same in this step; run the same function on every rank"
_BYTE = 0xFF
_DIGEST_BYTES = 64  # blake2b's most; a few bits of it fit into one step, others into the next


class Stamp:
    """One replica's bits of one optimizer in one program.

    Args:
        program: What the step does.
        rule: The optimizer.
        layout: Where its variables lie.
        place: Where the bits go: what is free of the arena's header.
        communicator: Has one member per replica.
        brought: Of what the replica's process brings to this step.
    """

    def __init__(
        self,
        program: Outline,
        rule: UpdateRule,
        layout: Layout,
        place: np.ndarray,
        communicator: Communicator,
        brought: Fingerprint,
    ) -> None:
        self._program = program
        self._rule = rule
        self._order = [span.name for span in layout.spans]
        self._place = place
        self._communicator = communicator
        self._brought = brought
        self._steps = _DIGEST_BYTES * 8 // place.size  # how many a digest's bits last for
        parts = [place[start : start + 8] for start in range(0, place.size, 8)]
        self._parts = [
            (part, *_tables(place.dtype, part.size, communicator.size)) for part in parts
        ]
        self._settings: dict[str, Any] | None = None
        self._period = -1
        self._rows: list[tuple[int, np.ndarray, bytes]] = []  # each's bits, also as they are summed
        self.sums = b""  # what all bits have to add up to in this step
        self._iterations = 0

    def put(self, iterations: int) -> None:
        """Put this step's bits into the header, before it is reduced."""
        settings = self._rule.get_config()
        period, step = divmod(iterations, self._steps)
        if period != self._period or settings != self._settings:
            self._draw(settings, period)
        self._iterations = iterations
        bits, row, self.sums = self._rows[step]
        if not self._brought.digest:
            self._place[...] = row
            return
        bits ^= self._brought.bits(iterations, self._place.size)
        self.sums = b""
        for place, rows, sums in self._parts:
            place[...] = rows[bits & _BYTE]
            self.sums += sums[bits & _BYTE]
            bits >>= 8

    def check(self) -> None:
        """Look at what became of the bits.

        Raises:
            MismatchError: Ranks run different programs, or have different settings; on all of them.
        """
        if self._place.tobytes() != self.sums:
            raise self._difference()

    def _draw(self, settings: dict[str, Any], period: int) -> None:
        self._settings, self._period = settings, period
        words = [line.words for line in self._program]
        order = [own_part(name) for name in self._order]
        text = json.dumps([words, self._shown(), order, period]).encode()
        digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
        word, size = int.from_bytes(digest, "little"), self._place.size
        self._rows.clear()
        for step in range(self._steps):
            bits = word >> size * step & 2**size - 1
            chosen = [part[bits >> 8 * i & _BYTE] for i, (_, part, _) in enumerate(self._parts)]
            row = np.concatenate(chosen)
            sums = (row * self._communicator.size).astype(row.dtype)
            self._rows.append((bits, row, sums.tobytes()))

    def _shown(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in (self._settings or {}).items())
        return f"{type(self._rule).__name__}({values})"

    def _difference(self) -> MismatchError:
        """Have all members tell what they do; say where two of them differ first."""
        here = world().rank
        own = [self._shown(), self._iterations, self._order, self._program, self._brought.told()]
        first, *others = exchange_plain(self._communicator, "what ranks do in a step", [here, *own])
        found = filter(None, (_said(*first, *other) for other in others))
        return everywhere(MismatchError(f"rank {here}: {next(found, _UNTOLD)}"))


@lru_cache
def _tables(dtype: np.dtype[Any], size: int, members: int) -> tuple[np.ndarray, list[bytes]]:
    """Give, for each byte, its lowest bits as an arena has them, and what all members' add up to.

    Tables, because a step has a microsecond for it.
    """
    numbers = np.arange(_BYTE + 1, dtype=np.uint8)[:, None]
    rows = np.unpackbits(numbers, axis=1, count=size, bitorder="little").astype(dtype)
    sums = (rows * members).astype(dtype)
    return rows, [row.tobytes() for row in sums]


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
    brought: list[Any],
    other_rank: int,
    other_optimizer: str,
    other_iterations: int,
    other_order: list[str],
    other_program: list[list[str]],
    other_brought: list[Any],
) -> str:
    """Say where two ranks differ first; nothing where they do not."""

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
        if own_part(name) != own_part(other_name):
            what = f"by the optimizer's first step, its variable {place} is"
            remedy = "make the optimizer anew, and let its first step be the same on every rank"
            return differ(what, repr(name), repr(other_name), remedy)
    if iterations != other_iterations:
        remedy, steps = "load its state on every rank", f"{iterations} steps"
        return differ("the optimizer has done", steps, str(other_iterations), remedy)
    return fingerprint.difference(rank, brought, other_rank, other_brought)
