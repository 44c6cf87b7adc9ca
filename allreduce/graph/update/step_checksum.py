"""Check in every step that all ranks run the same program, by a digest in the gradients' sum.

Each replica writes the digest to an arena's header, next to the number of samples, as integers that
are small enough for exact sums. The digest covers the step's program, the optimizer's settings, the
batches and assigned values. If all replicas have the same digest, each sum is the replica's own
number times the number of replicas. Otherwise all replicas find a different sum and raise before
the update. The check needs no separate message, and detects a learning rate that only one rank has
changed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from allreduce.comm import Communicator, world
from allreduce.devices import COLLECTIVE, owner, write
from allreduce.errors import MismatchError, NumericsError, everywhere
from allreduce.graph.consistency.rank_check import Fact, Facts, gather_facts, hash_of, mismatch
from allreduce.graph.core.naming import own_part
from allreduce.graph.trace.rank_digest import RankDigest
from allreduce.graph.update.update import UpdateRule
from allreduce.reduction import Arena, Layout

_SAME_SETTINGS = "give it the same settings on every rank, and change them on all"
_SAME_ORDER = "make the optimizer anew, and let its first step be the same on every rank"
_SAME_STEPS = "run as many steps on every rank, of the same functions with the same batches"
_WORD_BITS = 16  # of a digest, for each number: 31 of float16 take 62 bytes of blake2b's 64


class StepChecksum:
    """One replica's checksum of one optimizer in one program.

    Args:
        program: The facts of the step's program.
        rule: The optimizer.
        layout: The layout of its arena.
        place: The free part of the arena's header, for the checksum.
        communicator: The replicas' communicator.
        brought: The digest of the process's batches and assigned values.
    """

    def __init__(
        self,
        program: Facts,
        rule: UpdateRule,
        layout: Layout,
        place: np.ndarray,
        communicator: Communicator,
        brought: RankDigest,
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
        self._words = np.empty(place.shape, place.dtype)  # on the host
        self._communicator = communicator
        self._brought = brought
        self._members = communicator.size
        self._unused = _WORD_BITS - _bits(place.dtype, communicator.size)
        self._settings: dict[str, Any] | None = None
        self._begun = self._hash = hash_of(self._lasting, place.size * _WORD_BITS // 8)
        self.sums = b""  # the expected sums in this step
        self._iterations, self._earlier = 0, b""

    def note(self, arena: Arena) -> None:
        """Keep the digest of a step whose gradients are reduced by a later one."""
        arena.digests = self._digest(arena).digest()

    def put(self, arena: Arena) -> None:
        """Write this step's checksum to the header, before it is reduced."""
        words = np.frombuffer(self._digest(arena).digest(), np.uint16) >> self._unused
        self._words[...] = words
        self._write()
        self.sums = (self._words * self._words.dtype.type(self._members)).tobytes()

    def _write(self) -> None:
        """Set the header; on devices behind its last use, and before the next collective."""
        device = owner(self._place)
        if device is not None and self._communicator.enqueues_on(device):
            device.copy(self._place, self._words, device.own(COLLECTIVE))
        else:
            write(self._place, self._words)

    def _digest(self, arena: Arena) -> Any:
        settings = self._rule.get_config()
        if settings != self._settings:
            self._settings, self._hash = settings, self._begun.copy()
            self._hash.update(self._optimizer().encode())
        self._iterations, self._earlier = arena.iterations, arena.digests
        whole = self._hash.copy()
        whole.update(b"%d %d" % (arena.iterations, self._brought.digest))
        if arena.digests:
            whole.update(arena.digests)
        return whole

    def check(self, header: np.ndarray) -> None:
        """Check the reduced checksum, in the arena's header on the host.

        Raises:
            MismatchError: Ranks run different programs, or have different settings; on all of them.
        """
        if header[1:].tobytes() != self.sums:
            raise self._difference()

    def _optimizer(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in (self._settings or {}).items())
        return f"{type(self._rule).__name__}({values})"

    def _difference(self) -> MismatchError:
        """Gather the facts of all ranks; return an error that names the first difference."""
        own = {
            "the optimizer": Fact(self._optimizer(), _SAME_SETTINGS),
            "the number of steps that the optimizer has done": Fact(
                str(self._iterations), "load its state on every rank"
            ),
            "the update's earlier micro-batches": Fact("", _SAME_STEPS, self._earlier.hex()),
        }
        here, facts = world().rank, {**self._lasting, **own, **self._brought.facts()}
        facts_by_rank = gather_facts(self._communicator, here, "what ranks do in a step", facts)
        return mismatch(f"rank {here}", facts_by_rank)


def _bits(dtype: np.dtype[Any], members: int) -> int:
    """Return how many bits a number may have so that the sum over all members is exact.

    A difference is missed with probability 2**-n for n bits in all: 7 numbers of 16 bits in
    float64, 15 of 16 in float32, 31 of 10 in float16 (with two members).
    """
    exact = int(np.finfo(dtype).nmant) + 1
    return max(1, min(_WORD_BITS, exact - (members - 1).bit_length()))


def begin_update(arena: Arena, checksum: StepChecksum | None, leads: bool) -> None:
    """Check the header before an update; the first update of a step counts the iteration.

    Args:
        arena: The arena that is updated.
        checksum: The checksum; None if another update has checked it.
        leads: Whether this is the first update of the step.

    Raises:
        MismatchError: Ranks run different programs, or have different settings or data.
        NumericsError: The sum of all weights is negative or not finite; on all replicas.
    """
    if checksum is None and not leads:
        return
    header = arena.gradients[: arena.layout.header]
    if type(header) is not np.ndarray:  # on a device
        device = owner(header)
        assert device is not None, "a device's array"
        header = device.read(header, ready=True)
    if checksum is not None:
        checksum.check(header)
    if not leads:
        return
    count = float(header[0])
    if not 0 <= count < math.inf:
        message = f"the weights of all replicas add up to {count}; expected a finite number from 0"
        remedy = "check the weight given to minimize or apply"
        raise everywhere(NumericsError(f"{message} up: {remedy}"))
    arena.iterations += 1
