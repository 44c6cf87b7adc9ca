"""Look up which way a call takes: the table's rows that hold for one communicator."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from allreduce import _native
from allreduce.comm.calls.call import COLLECTIVES
from allreduce.comm.selection.table import TABLE, Row

_NO_LIMIT = (1 << 64) - 1  # as the native side has it
_IN_RINGS = ("staged", "pairwise")
_Way = tuple[int, bool, int, bool]
_Band = tuple[int, _Way, _Way, _Way]


class Choices:
    """The rows that hold for one communicator."""

    def __init__(self, members: int, rows: Iterable[Row]) -> None:
        self._members = members
        self._rows: dict[str, list[Row]] = {}
        for row in rows:
            for collective in row.collectives:
                self._rows.setdefault(collective, []).append(row)

    def choose(
        self,
        collective: str,
        nbytes: int | None,
        *,
        symmetric: bool = False,
        cross_process: bool = True,
    ) -> Row:
        """Look up the row that decides a call.

        Args:
            nbytes: Its bytes, as the table counts them; None if no member knows them all.
            symmetric: Whether it has arrays in symmetric memory, on the shared transport.
            cross_process: Whether other processes can read its arrays.
        """
        size = _NO_LIMIT if nbytes is None else nbytes
        held = [row for row in self._rows[collective] if _within(size, row.bytes)]
        assert held, f"no row holds for {collective}: the table's last rows hold for all"
        held = [row for row in held if cross_process or row.algorithm != "cross_process"]
        if held[0].transport == "shared" and held[0].algorithm != "eager":
            # In place nothing is copied, so the measurements for ordinary arrays do not apply.
            in_place = [row for row in held if row.algorithm == "direct"]
            ordinary = [row for row in held if row.algorithm != "direct"]
            held = (in_place if symmetric else []) + ordinary
        return held[0]

    def largest_chunk(self) -> int:
        """Return the bytes of the longest chunk of any call."""
        return max(row.chunk for rows in self._rows.values() for row in rows)

    @functools.cached_property
    def native(self) -> _native.Choices:
        """The same for native code: each collective's rules, its bands in rising order."""
        rules = []
        for collective, rows in self._rows.items():
            if collective == "barrier":  # which is always eager
                continue
            eager, bands = 0, list[_Band]()
            for limit in _limits(rows):
                plain = self.choose(collective, limit)
                if plain.algorithm == "eager":
                    eager = limit
                    continue
                best = self.choose(collective, limit, symmetric=True)
                rings = self.choose(collective, limit, cross_process=False)
                bands.append(
                    (
                        limit,
                        _way(best, "direct"),
                        _way(plain, "cross_process"),
                        _way(rings, *_IN_RINGS),
                    )
                )
            rules.append((COLLECTIVES.index(collective), eager, bands))
        return _native.Choices(self._members, rules)


def choices_for(
    transport: str, members: int, crowded: bool = False, *, pulls: bool = False
) -> Choices:
    """Return the choices for a communicator.

    Args:
        crowded: Whether they outnumber their cores, on the shared transport.
        pulls: Whether they may read each other's memory, on the shared transport.
    """
    rows = (
        row
        for row in TABLE
        if row.transport == transport
        and _within(members, row.members)
        and row.crowded in (None, crowded)
        and (pulls or row.algorithm != "cross_process")
    )
    return Choices(members, rows)


def _way(row: Row, *algorithms: str) -> _Way:
    """Return how the native side goes a way; with 0 bytes at a time it does not."""
    if row.algorithm not in algorithms:
        return 0, False, _NO_LIMIT, False
    past = _NO_LIMIT if row.past is None else row.past
    return row.chunk, row.stores == "streaming", past, row.algorithm == "pairwise"


def _limits(rows: Iterable[Row]) -> list[int]:
    """Return the numbers of bytes up to which the same rows hold, in rising order."""
    found = {_NO_LIMIT}
    for row in rows:
        low, high = row.bytes
        found |= {low - 1} if low else set()
        found |= set() if high is None else {high}
    return sorted(found)


def _within(number: int, limits: tuple[int, int | None]) -> bool:
    return limits[0] <= number and (limits[1] is None or number <= limits[1])
