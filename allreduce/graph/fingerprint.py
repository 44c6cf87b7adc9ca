"""What a rank brings to a step beside its program: values assigned since others, and its batches.

All ranks have to bring the same, or replicas drift apart without a sign. So a digest of it travels
with what they compare in each step anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np

from allreduce.graph.spec import show

if TYPE_CHECKING:
    from allreduce.graph.variable import Variable

_WORD = 1 << 64
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that what is multiplied stays as it was told apart

_SAME_VALUES = "call assign, set_weights and load_weights on every rank, with equal values"
_EQUAL_BATCHES = "strategy.distribute_dataset takes equal batches in the same order on every rank, "
_OWN_ROWS = "; a rank's own rows go to strategy.run as arrays"
_SAME_ORDER = f"{_EQUAL_BATCHES}so shuffle with one seed on all{_OWN_ROWS}"
_SAME_NUMBER = f"{_EQUAL_BATCHES}so give all as many{_OWN_ROWS}"


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
    def told(self) -> list[Any]:
        return [self.number, f"{self.dtype.name} {show(self.shape)}", self.digest]


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

    def told(self) -> list[Any]:
        """Give all of it as plain data."""
        nothing = _Change()
        changes = [(each.name, self._changes.get(each, nothing)) for each in self._variables]
        told = [[name, change.sum, change.where] for name, change in changes]
        return [told, [mark.told for mark in self.marks]]


def difference(rank: int, mine: Sequence[Any], other_rank: int, theirs: Sequence[Any]) -> str:
    """Say where what two ranks of the same program told differs first; nothing if nowhere."""
    for (name, change, where), (_, other_change, other_where) in zip(
        mine[0], theirs[0], strict=True
    ):
        if change != other_change:
            return (
                f"between steps variable {name!r} was given other values on rank {other_rank} "
                f"({_line(other_where)}) than on rank {rank} ({_line(where)}); {_SAME_VALUES}"
            )
    for one, other in zip_longest(mine[1], theirs[1]):
        if one != other:
            return _differing(rank, one, other_rank, other)
    return ""


def _line(where: str) -> str:
    return f"at {where}" if where else "by no call"


def _differing(
    rank: int, mine: Sequence[Any] | None, other_rank: int, theirs: Sequence[Any] | None
) -> str:
    if mine and theirs and 0 in (mine[0], theirs[0]) and mine[0] != theirs[0]:
        (anew, _), (on, number) = sorted(((rank, mine[0]), (other_rank, theirs[0])), key=_number)
        return (
            f"rank {anew} began its dataset anew where rank {on} went on with batch {number} "
            "(counted from 0): its own has fewer batches, or was left earlier; "
            f"{_SAME_NUMBER}"
        )
    shown = [
        "no batch of a dataset" if each is None else f"batch {each[0]} of a dataset, {each[1]}"
        for each in (mine, theirs)
    ]
    if shown[0] != shown[1]:
        said = f"{shown[0]}, on rank {rank} but {shown[1]}, on rank {other_rank}"
    else:
        said = f"{shown[0]}, whose values on rank {other_rank} are not rank {rank}'s"
    return f"the step is given {said}; {_SAME_ORDER}"


def _number(begun: tuple[int, int]) -> int:
    return begun[1]


def _digest(value: np.ndarray) -> int:
    return crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
