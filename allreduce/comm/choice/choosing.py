"""Looking choices up: the rows in force, and those that hold for one communicator."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from allreduce.comm.call import COLLECTIVES
from allreduce.comm.choice.table import TABLE, Row
from allreduce.errors import UsageError

BUILT_IN = "built-in"  # the source of a table without stored rows
_LINE = 64  # bytes; what a member has of a staged chunk at least
_NO_LIMIT = (1 << 64) - 1  # as the native side has it
_IN_RINGS = ("staged", "exchanged")
_Way = tuple[int, bool, int, bool]
_Band = tuple[int, _Way, _Way, _Way]


@dataclass(frozen=True, slots=True)
class Choice:
    """How one call is carried out."""

    algorithm: str
    chunk: int = 0  # bytes that one step moves at most; 0 where all goes at once
    stores: str = "ordinary"
    past: int | None = None

    @classmethod
    def of(cls, row: Row) -> Choice:
        """Return what a row chooses."""
        return cls(row.algorithm, row.chunk or 0, row.stores or "ordinary", row.past)

    def streams(self, nbytes: int) -> bool:
        """Say whether so much from one member is copied to the output past the caches."""
        return self.past is not None and nbytes >= self.past


@dataclass(frozen=True)
class Table:
    """All rows in force, the first that holds for a call deciding.

    Args:
        stored: Rows that stand before the built-in ones.
        source: Where they come from: a file, or `BUILT_IN`.

    Raises:
        UsageError: A stored row is not valid.
    """

    stored: tuple[Row, ...] = ()
    source: str = BUILT_IN
    rows: tuple[Row, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.stored:
            from allreduce.comm.choice.checking import check  # which few programs use

            for number, row in enumerate(self.stored, 1):
                check(row, f"{self.source}: row {number}")
        object.__setattr__(self, "rows", (*self.stored, *TABLE))

    @cached_property
    def digest(self) -> str:
        """Return a hash of all rows: equal on members that choose alike."""
        text = json.dumps([row._asdict() for row in self.rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def choices(
        self, transport: str, members: int, crowded: bool = False, *, pulls: bool = False
    ) -> Choices:
        """Return what holds for a communicator.

        Args:
            transport: Its transport.
            members: How many members it has.
            crowded: Whether they outnumber their cores, on the shared transport.
            pulls: Whether they may read each other's memory, on the shared transport.

        Raises:
            UsageError: A row does not fit so many members.
        """
        rows = [
            row
            for row in self.rows
            if row.transport == transport
            and _within(members, row.members)
            and row.crowded in (None, crowded)
            and (pulls or row.algorithm != "pulled")
        ]
        return Choices(rows, transport, members, self.source, pulls=pulls)


class Choices:
    """The rows that hold for one communicator."""

    def __init__(
        self, rows: Iterable[Row], transport: str, members: int, source: str, *, pulls: bool
    ) -> None:
        self.pulls = pulls  # whether members may read each other's memory
        self._rows: dict[str, list[Row]] = {}
        for row in rows:
            for collective in row.collectives:
                self._rows.setdefault(collective, []).append(row)
            if row.algorithm == "staged" and (row.chunk or 0) < members * _LINE:
                raise UsageError(
                    f"[{transport}] {source}: a staged chunk of {row.chunk} bytes is too short for "
                    f"{members} members, which need {_LINE} bytes of it each; limit the row's "
                    "members, or give it a longer chunk"
                )
        for collective, ranked in self._rows.items():
            _check_small(f"[{transport}] {source}", collective, ranked)

    def choose(
        self,
        collective: str,
        nbytes: int | None,
        *,
        symmetric: bool = False,
        pulled: bool = True,
    ) -> Choice:
        """Look a call up.

        Args:
            collective: Its name.
            nbytes: Its bytes, as `choices` defines them; None if no member knows them all.
            symmetric: Whether it has arrays in symmetric memory, on the shared transport.
            pulled: Whether its arrays can be read by other members, there.
        """
        size = _NO_LIMIT if nbytes is None else nbytes
        held = [row for row in self._rows[collective] if _within(size, row.bytes)]
        assert held, f"no row holds for {collective}: the table's last rows hold for all"
        held = [row for row in held if pulled or row.algorithm != "pulled"]
        if held[0].transport == "shared" and held[0].algorithm != "small":
            # In place nothing is copied: what is best for ordinary arrays does not matter there.
            in_place = [row for row in held if row.algorithm == "direct"]
            ordinary = [row for row in held if row.algorithm != "direct"]
            held = (in_place if symmetric else []) + ordinary
        return Choice.of(held[0])

    def alike(
        self, collective: str, nbytes: int, band: tuple[int, int | None], *, symmetric: bool
    ) -> tuple[int, int | None] | None:
        """Return for which sizes of a band calls go as one of `nbytes` does.

        Of several parts of the band that do it is the one of `nbytes`, or the first beyond; None if
        there is none.
        """
        wanted = self.choose(collective, nbytes, symmetric=symmetric)
        low, high = band[0], _NO_LIMIT if band[1] is None else band[1]
        ends = [end for end in _limits(self._rows[collective]) if low <= end < high]
        found: tuple[int, int] | None = None
        for end in (*ends, high):
            if self.choose(collective, end, symmetric=symmetric) == wanted:
                found = (low if found is None else found[0], end)
            elif found is not None and found[1] >= nbytes:
                break
            else:
                found = None
            low = end + 1
        if found is None:
            return None
        return found[0], None if found[1] == _NO_LIMIT else found[1]

    def largest_chunk(self) -> int:
        """Return the bytes of the longest chunk of any call."""
        return max(row.chunk or 0 for rows in self._rows.values() for row in rows)

    def native(self) -> list[tuple[int, int, list[_Band]]]:
        """Return what `_native.Group` takes: each collective's rules, its bands in rising order."""
        rules = []
        for collective, rows in self._rows.items():
            if collective == "barrier":  # which is always small
                continue
            small, bands = 0, list[_Band]()
            for limit in _limits(rows):
                plain = self.choose(collective, limit)
                if plain.algorithm == "small":
                    small = limit
                    continue
                best = self.choose(collective, limit, symmetric=True)
                rings = self.choose(collective, limit, pulled=False)
                bands.append(
                    (limit, _way(best, "direct"), _way(plain, "pulled"), _way(rings, *_IN_RINGS))
                )
            rules.append((COLLECTIVES.index(collective), small, bands))
        return rules


def _way(choice: Choice, *algorithms: str) -> _Way:
    """Return how the native side goes a way; with 0 bytes at a time it does not."""
    if choice.algorithm not in algorithms:
        return 0, False, _NO_LIMIT, False
    past = _NO_LIMIT if choice.past is None else choice.past
    return choice.chunk, choice.stores == "streaming", past, choice.algorithm == "exchanged"


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


def _check_small(where: str, collective: str, rows: list[Row]) -> None:
    """Small calls are the smallest, whatever memory they are in: one comparison tells them."""
    other = None  # bytes of calls that are not small
    for limit in sorted({0, *_limits(rows)}):
        first = next((row.algorithm for row in rows if _within(limit, row.bytes)), "none")
        again = first == "small" and other is not None
        if again or (limit == 0 and first not in ("small", "mpi")):
            raise UsageError(
                f"{where}: {collective} would go small in other sizes than the smallest; let rows "
                "of the small algorithm hold from 0 bytes on, and before all others"
            )
        if first != "small":
            other = limit
