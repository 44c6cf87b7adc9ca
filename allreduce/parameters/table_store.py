"""One server's rows of a table: looked up by number, and updated only where a step has used them.

With Adam, the moments of other rows do not decay ("lazy Adam").
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from allreduce import _native
from allreduce.errors import ShapeError
from allreduce.parameters.arena_store import ArenaStore
from allreduce.parameters.partition import Part

# Of rows that are updated together. 53,000 rows of 64 bytes with Adagrad take 9.1 ms in one array,
# 6.1 in blocks of 16 KiB, and 5.1 to 5.4 in blocks of 32 to 256 KiB (Zen 4, beside other load).
_BLOCK_BYTES = 1 << 17


def rows_of_servers(rows: int, servers: int) -> list[tuple[int, int]]:
    """Return the first row of each server, and the row behind its last."""
    cuts = [rows * index // servers for index in range(servers + 1)]
    return list(pairwise(cuts))


class SortedRows:
    """The different numbers in an array, and the places of each.

    Args:
        numbers: `(n,)`, int32 or int64, from 0 on.

    Attributes:
        unique: The different numbers `(k,)`, rising, in the dtype of `numbers`.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        numbers = np.ascontiguousarray(numbers)
        count = len(numbers)
        self._order = np.empty(count, np.int64)
        unique, starts = np.empty_like(numbers), np.empty(count + 1, np.int64)
        found = _native.group_numbers(numbers, unique, self._order, starts)
        self.unique: np.ndarray = unique[:found]
        self._starts = starts[: found + 1]

    def spread(self, part: slice, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy the rows of some of the different numbers to all places of each number.

        Args:
            part: Which of the different numbers.
            rows: Theirs, `(m, width)`.
            out: `(n, width)`.
        """
        starts = self._starts[part.start : part.stop + 1]
        _native.spread_rows(starts, self._order, rows.view(np.uint8), out.view(np.uint8))

    def sums(self, gradients: np.ndarray) -> np.ndarray:
        """Add up the gradients of each number, in their order: `(n, width)` to `(k, width)`."""
        found = np.empty((len(self.unique), gradients.shape[1]), gradients.dtype)
        _native.add_rows(self._starts, self._order, np.ascontiguousarray(gradients), found)
        return found


def add_duplicates(numbers: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different numbers, rising, and the sum of the gradients of each."""
    rows = SortedRows(numbers)
    return rows.unique, rows.sums(gradients)


class TableStore(ArenaStore):
    """Some rows of a table and their slots; safe to use from several threads.

    Args:
        name: The table's path.
        first: The first row.
        stop: The row behind the last.
        width: The size of a row.
        dtype: Of the rows.
    """

    def __init__(self, name: str, first: int, stop: int, width: int, dtype: Any) -> None:
        size = (stop - first) * width
        part = Part(first * width, stop * width, ((name, 0, size),) if size else ())
        super().__init__(part, None, dtype)  # the first gradients come with an optimizer
        self.first, self.width, self._name = first, width, name
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []  # of a synchronous update

    def fill(self, row: int, values: np.ndarray, *, last: bool) -> None:
        """Set initial values of rows from number `row` on, unless all have values.

        Args:
            row: The first row.
            values: `(n, width)`.
            last: Whether all rows have values then.
        """
        start = (row - self.first) * self.width
        with self._changed:
            if self.has_values:  # of another worker; gradients have changed them maybe
                return
            self.parameters[start : start + values.size] = values.reshape(-1)
            if last:
                self.source, self.has_values = "initial values", True
                self._changed.notify_all()

    def lookup(self, numbers: np.ndarray) -> np.ndarray:
        """Return rows `(n, width)` by their numbers `(n,)` in the whole table."""
        rows = self._rows_of(self.parameters).take(self._local(numbers))
        found: np.ndarray = rows.view(self.dtype).reshape(-1, self.width)
        return found

    def push_rows(
        self,
        numbers: np.ndarray,
        gradients: np.ndarray,
        count: float,
        seen: int,
        worker: str = "",
        number: int = 0,
    ) -> int:
        """Update some rows at once; `push` says what the arguments and the result are.

        Args:
            numbers: Different and rising, `(n,)`.
            gradients: `(n, width)`.
            count: What to divide by.
            seen: The version that the worker has read.
            worker: Its name.
            number: The number of the gradient.
        """
        with self._changed:
            stale = self._admit(seen, worker, number)
            if stale >= 0:
                self._apply_rows(numbers, gradients, count)
        return stale

    def contribute_rows(
        self,
        numbers: np.ndarray,
        gradients: np.ndarray,
        count: float,
        update: int,
        share: int,
        of: int,
    ) -> None:
        """Add one share of a synchronous update; `contribute` says what the arguments are."""
        with self._changed:
            if not self._admit_share(update, share):
                return
            if not self._shares:
                self._rows, self._count = [], 0.0
            self._rows.append((numbers.copy(), gradients.copy()))
            self._count += count
            self._shares.add(share)
            if len(self._shares) == of:
                self._shares.clear()
                self._applied = update
                parts: Sequence[Any] = list(zip(*self._rows, strict=True))
                rows, sums = add_duplicates(np.concatenate(parts[0]), np.concatenate(parts[1]))
                self._rows = []
                self._apply_rows(rows, sums, self._count)

    def applied(self, update: int, timeout: float) -> bool:
        """Wait until a synchronous update is over, or lost; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._applied >= update or self._current > update, timeout
            )

    def lose(self, update: int) -> None:
        """Drop a synchronous update, other shares of which went to an earlier process of the task.

        Nothing is dropped if the update is over, or the next one has begun.
        """
        with self._changed:
            if self._applied < update and self._current <= update:
                self._applied = update
                self._shares.clear()
                self._changed.notify_all()

    def _apply_rows(self, numbers: np.ndarray, gradients: np.ndarray, count: float) -> None:
        step = self.version + 1
        self.optimizer.check(step)
        rows, divisor = self._local(numbers), np.asarray([count], self.dtype)
        size = max(_BLOCK_BYTES // (self.width * self.dtype.itemsize), 1)
        for first in range(0, len(rows), size):
            block = slice(first, first + size)
            self._apply_block(rows[block], gradients[block], divisor, step)
        self._finish(step)

    def _apply_block(
        self, rows: np.ndarray, gradients: np.ndarray, divisor: np.ndarray, step: int
    ) -> None:
        """Update copies of rows that caches hold, and copy them back."""
        stored = {name: self._rows_of(array) for name, array in self.slots.items()}
        copies = {name: each.take(rows) for name, each in stored.items()}
        slots = {name: each.view(self.dtype) for name, each in copies.items()}
        parameters = self._rows_of(self.parameters)
        values = parameters.take(rows)
        update = self.optimizer.bucket_update([(self._name, slice(0, gradients.size))])
        update(values.view(self.dtype), gradients.reshape(-1), slots, divisor, step)
        parameters.put(rows, values, mode="clip")
        for name, each in stored.items():
            each.put(rows, copies[name], mode="clip")

    def _rows_of(self, array: np.ndarray) -> np.ndarray:
        """View an array of the store as one element per row: NumPy writes these 3 times as fast."""
        return array.view(f"V{self.width * self.dtype.itemsize}")

    def _local(self, numbers: np.ndarray) -> np.ndarray:
        rows = numbers.astype(np.int64) - self.first
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.part.size // self.width:
            raise ShapeError(
                f"[parameter server] table {self._name!r}: rows {numbers.min()} to {numbers.max()} "
                f"were asked of the server of {self.first} to "
                f"{self.first + self.part.size // self.width - 1}; do all workers have the same "
                "cluster?"
            )
        return rows
