"""What a rank brings to a step beside its program: values assigned since others, and its batches.

All ranks have to bring the same, or replicas drift apart without a sign. So a digest of it travels
with what they compare in each step anyway.
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


class Mark(NamedTuple):
    """One array of a global batch.

    Attributes:
        number: The batch's, from 0 in each pass over its dataset.
        dtype: The array's.
        shape: The array's, with the rows of all replicas.
        digest: Of these and of some of its values.
    """

    number: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    digest: int

    @classmethod
    def of(cls, array: np.ndarray, number: int) -> Mark:
        """Mark a batch's array, in a few microseconds however large it is."""
        values = sample(array, _SAMPLED)
        digest = crc32(values.tobytes(), _kind(number, array.dtype, array.shape))
        return cls(number, array.dtype, array.shape, digest)

    @property
    def fact(self) -> Fact:
        shown = f"batch {self.number} (counted from 0) of a dataset, {self.dtype.name}"
        return Fact(f"{shown} {show(self.shape)}", _SAME_BATCHES, str(self.digest))


# About so many values, or all there are, tell data apart that were shuffled otherwise.
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
    """What assignments between steps have made of a variable."""

    sum: int = 0  # of what they left, less what they found
    where: str = ""  # the latest one's line


class Fingerprint:
    """What has to be equal on all ranks in this step, of one process.

    Of each assignment between steps, the digest of what it leaves is added and that of what it
    finds is taken away. So it counts neither how often, nor by how many calls, a variable has come
    to have a value: those who have equal values after all have equal sums.

    Attributes:
        marks: Of the batches that the step is given.
    """

    def __init__(self) -> None:
        self.marks: tuple[Mark, ...] = ()
        self._changes: WeakKeyDictionary[Variable, _Change] = WeakKeyDictionary()
        self._variables: Sequence[Variable] = ()
        self._changed = 0  # what has become of these

    def involve(self, variables: Sequence[Variable]) -> None:
        """Say what the step's results depend on; one that has another may have its own value."""
        if variables is not self._variables:
            self._variables = variables
            self._add_up()

    def assign(self, variable: Variable, after: np.ndarray, where: str) -> None:
        """Take down that code between steps is about to give a variable a value.

        Args:
            variable: Which, with what it has.
            after: What it gets, of the same shape and type.
            where: The user's line.
        """
        change = self._changes.setdefault(variable, _Change())
        more = _digest(after) - _digest(variable.storage[0])
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
        """A word for all of it; 0 where there is nothing to compare."""
        found = self._changed
        for mark in self.marks:  # in each step
            found = (found * _FACTOR + mark.digest) % _WORD
        return found

    def facts(self) -> Facts:
        """Describe all of it."""
        found: dict[str, Fact] = {}
        for place, variable in enumerate(self._variables):
            change = self._changes.get(variable, _Change())
            line = f"assigned at {change.where}" if change.where else "not assigned"
            where = f"{variable.name!r}, {line}"
            name = f"variable {place} of the step, assigned between steps,"
            found[name] = Fact("", _SAME_VALUES, str(change.sum), where)
        for place, mark in enumerate(self.marks):
            found[f"array {place} from distribute_dataset"] = mark.fact
        return found


def _digest(value: np.ndarray) -> int:
    return crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
