"""Ranks make sure in every step that they do alike: by numbers that are summed with the gradients.

An arena's header has room beside the number of samples. Each replica puts whole numbers there: a
digest of the step's program, the optimizer's settings, and what else all ranks bring alike. The
numbers are so small that sums of them are exact. If all replicas have the same digest, each sum is
a replica's own number times the number of replicas. Otherwise all replicas find another sum, and
raise before anything is updated. So the check takes no message of its own, and finds a learning
rate that only one rank has changed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from allreduce.comm import Communicator, world
from allreduce.errors import MismatchError, NumericsError, everywhere
from allreduce.graph.consistency.rank_check import Fact, Facts, gather_facts, hash_of, mismatch
from allreduce.graph.core.naming import own_part
from allreduce.graph.trace.rank_digest import Fingerprint
from allreduce.graph.update.update import UpdateRule
from allreduce.reduction import Arena, Layout

_SAME_SETTINGS = "give it the same settings on every rank, and change them on all"
_SAME_ORDER = "make the optimizer anew, and let its first step be the same on every rank"
_WORD_BITS = 16  # of a digest, for each number: 31 of float16 take 62 bytes of blake2b's 64


class Stamp:
    """One replica's numbers of one optimizer in one program.

    Args:
        program: What the step does.
        rule: The optimizer.
        layout: Where its variables lie.
        place: Where the numbers go: what is free of the arena's header.
        communicator: Has one member per replica.
        brought: Of what the replica's process brings to this step.
    """

    def __init__(
        self,
        program: Facts,
        rule: UpdateRule,
        layout: Layout,
        place: np.ndarray,
        communicator: Communicator,
        brought: Fingerprint,
    ) -> None:
        self._lasting: Facts = {
            **program,
            **{
                f"variable {place} of the optimizer's first step": Fact(
                    repr(span.name), _SAME_ORDER, own_part(span.name)
                )
                for place, span in enumerate(layout.spans)
            },
        }
        self._rule = rule
        self._place = place
        self._communicator = communicator
        self._brought = brought
        self._members = communicator.size
        self._unused = _WORD_BITS - _bits(place.dtype, communicator.size)
        self._settings: dict[str, Any] | None = None
        self._begun = self._hash = hash_of(self._lasting, place.size * _WORD_BITS // 8)
        self.sums = b""  # what the numbers have to add up to in this step
        self._iterations = 0

    def put(self, iterations: int) -> None:
        """Put this step's numbers into the header, before it is reduced."""
        settings = self._rule.get_config()
        if settings != self._settings:
            self._settings, self._hash = settings, self._begun.copy()
            self._hash.update(self._optimizer().encode())
        self._iterations = iterations
        whole = self._hash.copy()
        whole.update(b"%d %d" % (iterations, self._brought.digest))
        words = np.frombuffer(whole.digest(), np.uint16) >> self._unused
        self._place[...] = words
        self.sums = (self._place * self._place.dtype.type(self._members)).tobytes()

    def check(self) -> None:
        """Look at what became of the numbers.

        Raises:
            MismatchError: Ranks run different programs, or have different settings; on all of them.
        """
        if self._place.tobytes() != self.sums:
            raise self._difference()

    def _optimizer(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in (self._settings or {}).items())
        return f"{type(self._rule).__name__}({values})"

    def _difference(self) -> MismatchError:
        """Give all members the facts of each rank; name the first that differs."""
        own = {
            "the optimizer": Fact(self._optimizer(), _SAME_SETTINGS),
            "the number of steps that the optimizer has done": Fact(
                str(self._iterations), "load its state on every rank"
            ),
        }
        here, facts = world().rank, {**self._lasting, **own, **self._brought.facts()}
        everyones = gather_facts(self._communicator, here, "what ranks do in a step", facts)
        return mismatch(f"rank {here}", everyones)


def _bits(dtype: np.dtype[Any], members: int) -> int:
    """Say how many bits a number may have, so that the sum of all members' is exact.

    Members that differ are found by all but once in 2 to the power of the bits of all numbers:
    7 numbers of 16 bits in float64, 15 of 16 in float32, 31 of 10 in float16 (of two members).
    """
    exact = int(np.finfo(dtype).nmant) + 1
    return max(1, min(_WORD_BITS, exact - (members - 1).bit_length()))


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
