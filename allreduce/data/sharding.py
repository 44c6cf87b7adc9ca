"""Plans that assign the rows of each batch to replicas.

A global batch is split into one contiguous part per replica, in the order of their ids. If it does
not divide evenly, the first replicas take one row more; a batch smaller than the number of replicas
leaves the last ones without rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np

from allreduce.errors import UsageError


def split_rows(rows: int, parts: int) -> tuple[int, ...]:
    """Split `rows` into `parts` sizes that differ by at most one, larger ones first."""
    each, extra = divmod(rows, parts)
    return tuple(each + (part < extra) for part in range(parts))


def starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the first row of each of consecutive parts."""
    return tuple(accumulate(sizes[:-1], initial=0)) if sizes else ()


@dataclass(frozen=True, slots=True)
class Piece:
    """One replica's rows of one batch.

    Attributes:
        source: The first row, in this rank's order of its arrays.
        rows: The number of rows; 0 for a replica without any.
        offset: The first row's position in the global batch.
    """

    source: int
    rows: int
    offset: int


class Plan(Protocol):
    """One pass over the data."""

    @property
    def steps(self) -> int:
        """The number of batches; the same on every rank."""
        ...

    def pieces(self, step: int) -> tuple[Piece, ...]:
        """Return every replica's piece of a batch, by replica id."""
        ...


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank has all rows and takes its own share of each batch."""

    rows: int
    batch_size: int
    replicas: int

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)

    @property
    def steps(self) -> int:
        return -(-self.rows // self.batch_size)

    def pieces(self, step: int) -> tuple[Piece, ...]:
        first = step * self.batch_size
        sizes = split_rows(min(self.batch_size, self.rows - first), self.replicas)
        return tuple(
            Piece(first + offset, size, offset)
            for size, offset in zip(sizes, starts(sizes), strict=True)
        )


@dataclass(frozen=True)
class Sharded:
    """Every rank has its own rows, and contributes its share of each batch until they run out.

    Attributes:
        rows: The number of rows of each rank.
        replicas: The number of replicas of each rank.
    """

    rows: tuple[int, ...]
    batch_size: int
    replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        if self.batch_size < sum(self.replicas) and any(
            rows and not quota for rows, quota in zip(self.rows, self.quotas, strict=True)
        ):
            raise UsageError(
                f"a global batch of {self.batch_size} leaves some of the {sum(self.replicas)} "
                'replicas without rows in every step; with data="sharded" their ranks\' data would '
                f"never be used: choose batch_size >= {sum(self.replicas)}"
            )

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """How many rows of a full batch each rank contributes."""
        sizes = iter(split_rows(self.batch_size, sum(self.replicas)))
        return tuple(sum(next(sizes) for _ in range(count)) for count in self.replicas)

    @property
    def steps(self) -> int:
        return max(
            -(-rows // quota) if rows else 0
            for rows, quota in zip(self.rows, self.quotas, strict=True)
        )

    def pieces(self, step: int) -> tuple[Piece, ...]:
        found: list[Piece] = []
        offset = 0
        for rows, quota, replicas in zip(self.rows, self.quotas, self.replicas, strict=True):
            first = step * quota
            source = min(first, rows)
            for size in split_rows(max(0, min(quota, rows - first)), replicas):
                found.append(Piece(source, size, offset))
                source += size
                offset += size
        return tuple(found)


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch size that is no integer above 0."""
    whole = isinstance(batch_size, int | np.integer) and not isinstance(batch_size, bool)
    if not whole or batch_size < 1:
        raise UsageError(f"batch_size is the global batch, an integer above 0, not {batch_size!r}")
