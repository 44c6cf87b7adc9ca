"""Digest the batches of a step and the values assigned between steps.

Both must be equal on all ranks, or replicas drift apart silently. The digest is part of the
checksum that ranks compare in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np

from allreduce.graph.consistency.rank_check import Fact, Facts
from allreduce.graph.core.spec import show

if TYPE_CHECKING:
    from allreduce.graph.trace.variable import Variable

_WORD = 1 << 64
_FACTOR = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64

_SAME_VALUES = "call assign, set_weights and load_weights on every rank, with equal values"
_SAME_BATCHES = (
    "strategy.distribute_dataset takes equal batches in the same order on every rank, so give all "
    "as many, and shuffle with one seed; a rank's own rows go to strategy.run as arrays"
)


class BatchDigest(NamedTuple):
    """One array of a global batch.

    Attributes:
        number: The batch's number, from 0 in each pass over its dataset.
        shape: The array's shape, with the rows of all replicas.
        digest: A CRC of these and of a sample of the values.
    """

    number: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    digest: int

    @classmethod
    def of(cls, array: np.ndarray, number: int) -> BatchDigest:
        """Digest a batch's array, in a few microseconds whatever its size."""
        values = sample(array, _SAMPLED)
        digest = crc32(values.tobytes(), _kind(number, array.dtype, array.shape))
        return cls(number, array.dtype, array.shape, digest)

    @property
    def fact(self) -> Fact:
        shown = f"batch {self.number} (counted from 0) of a dataset, {self.dtype.name}"
        return Fact(f"{shown} {show(self.shape)}", _SAME_BATCHES, str(self.digest))


# The approximate number of values that are sampled, enough to detect another shuffle.
_SAMPLED = 128


def sample(array: np.ndarray, number: int) -> np.ndarray:
    """Read about `number` values, evenly spread over an array; all values of a smaller one.

    Arrays of one shape are read at the same places, whatever their layout in memory.
    """
    flat = array.ravel() if array.flags.c_contiguous else array.flat
    return flat[:: _distance(array.shape, array.size // number)]


@lru_cache(maxsize=1024)
def _distance(shape: tuple[int, ...], least: int) -> int:
    """Find a distance coprime to the size of a row, so that the sample visits every column."""
    row, distance = prod(shape[1:]), max(1, least)
    while gcd(distance, row) > 1:
        distance += 1
    return distance


@lru_cache(maxsize=1024)
def _kind(number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return crc32(repr((number, dtype.str, shape)).encode())


@dataclass(slots=True)
class _Change:
    """The effect of assignments between steps on a variable."""

    sum: int = 0  # of the digests after, minus those before
    where: str = ""  # the line of the latest assignment


class RankDigest:
    """One process's digest of the data that must be equal on all ranks in this step.

    Each assignment adds the digest of the new value and subtracts that of the old one. The sum
    therefore depends on the final value only, not on the number of assignments.

    Attributes:
        batch_digests: The digests of the step's batches.
    """

    def __init__(self) -> None:
        self.batch_digests: tuple[BatchDigest, ...] = ()
        self._changes: WeakKeyDictionary[Variable, _Change] = WeakKeyDictionary()
        self._variables: Sequence[Variable] = ()
        self._changed = 0  # the digest of their changes

    def involve(self, variables: Sequence[Variable]) -> None:
        """Set the variables that the step's results depend on; others are not compared."""
        if variables is not self._variables:
            self._variables = variables
            self._add_up()

    def assign(self, variable: Variable, after: np.ndarray, where: str) -> None:
        """Record an assignment between steps, before it is made."""
        change = self._changes.setdefault(variable, _Change())
        more = _digest(after) - _digest(variable.numpy())
        change.sum, change.where = (change.sum + more) % _WORD, where
        self._add_up()

    def _add_up(self) -> None:
        self._changed = 0
        for variable in self._variables:
            change = self._changes.get(variable)
            more = 0 if change is None else change.sum
            self._changed = (self._changed * _FACTOR + more) % _WORD

    @property
    def digest(self) -> int:
        """A 64-bit digest; 0 if there is nothing to compare."""
        found = self._changed
        for digest in self.batch_digests:  # in each step
            found = (found * _FACTOR + digest.digest) % _WORD
        return found

    def facts(self) -> Facts:
        """Return the digests as facts, for an error message."""
        found: dict[str, Fact] = {}
        for place, variable in enumerate(self._variables):
            change = self._changes.get(variable, _Change())
            line = f"assigned at {change.where}" if change.where else "not assigned"
            where = f"{variable.name!r}, {line}"
            name = f"variable {place} of the step, assigned between steps,"
            found[name] = Fact("", _SAME_VALUES, str(change.sum), where)
        for place, digest in enumerate(self.batch_digests):
            found[f"array {place} from distribute_dataset"] = digest.fact
        return found


def _digest(value: np.ndarray) -> int:
    return crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
