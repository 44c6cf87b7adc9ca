"""Looking choices up: rows checked, and those that hold for one communicator."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from allreduce import _native
from allreduce.comm.call import COLLECTIVES
from allreduce.comm.choice.table import ALGORITHMS, TABLE, Row
from allreduce.errors import UsageError, unknown_name

BUILT_IN = "built-in"  # the source of a table without stored rows
_LINE = 64  # bytes; what a member has of a staged chunk at least
_LEAST_CHUNK = 4096
_LARGEST_STEP = 1 << 30  # of direct or pulled work, between which other calls have their turn
_NO_LIMIT = (1 << 64) - 1  # as the native side has it
_STORES = ("ordinary", "streaming")
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
        for number, row in enumerate(self.stored, 1):
            _check(row, f"{self.source}: row {number}")
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


def _check(row: Row, where: str) -> None:
    """Check a row by itself.

    Raises:
        UsageError: It is not valid; the message says where it stands and what is wrong.
    """
    if row.transport not in ALGORITHMS:
        raise _wrong(where, unknown_name("transport", row.transport, ALGORITHMS))
    algorithms = ALGORITHMS[row.transport]
    if row.algorithm not in algorithms:
        raise _wrong(where, unknown_name("algorithm", row.algorithm, algorithms))
    for collective in row.collectives:
        if collective not in algorithms[row.algorithm]:
            known = algorithms[row.algorithm]
            raise _wrong(where, unknown_name(f"{row.algorithm} collective", collective, known))
    for name, low, (least, most) in (("members", 1, row.members), ("bytes", 0, row.bytes)):
        if least < low or (most is not None and most < least):
            raise _wrong(where, f"{name} from {least} to {most}; expected a range from {low} up")
    if row.crowded is not None and row.transport != "shared":
        raise _wrong(where, "crowded is told apart on the shared transport only")
    if row.algorithm == "exchanged" and row.members != (2, 2):
        raise _wrong(where, "an exchanged row for other than 2 members; these alone exchange")
    _check_chunk(row, where)
    if (row.stores is not None) != (row.algorithm == "staged"):
        raise _wrong(where, f"stores={row.stores!r}; a staged row, and no other, has to say which")
    if row.stores not in (None, *_STORES):
        raise _wrong(where, unknown_name("kind of stores", row.stores, _STORES))
    copies = row.transport == "shared" and row.algorithm != "small"
    if row.past is not None and (not copies or row.past < 1):
        expected = "1 or more, on rows of the shared transport that are not small"
        raise _wrong(where, f"past={row.past}; expected a number of bytes, {expected}")


def _check_chunk(row: Row, where: str) -> None:
    if row.algorithm in ("small", "mpi"):
        room = _native.SLOT_BYTES if row.transport == "shared" else _native.TCP_EAGER_BYTES
        if row.algorithm == "small" and (row.bytes[1] is None or row.bytes[1] > room):
            raise _wrong(where, f"bytes up to {row.bytes[1]}, but a small call has room for {room}")
        if row.chunk is not None:
            raise _wrong(where, f"a chunk of {row.chunk} bytes, but {row.algorithm} has no chunks")
        return
    if row.algorithm == "pulled" and row.bytes[0] <= _native.SLOT_BYTES:
        least = _native.SLOT_BYTES + 1
        raise _wrong(where, f"bytes from {row.bytes[0]}; expected {least} or more of a pulled row")
    limit = {
        "staged": _native.RING_BYTES,
        "exchanged": _native.LAP_BYTES,
        "direct": _LARGEST_STEP if row.transport == "shared" else _native.TCP_CHUNK_BYTES,
        "chain": _native.TCP_CHUNK_BYTES,
        "pulled": _LARGEST_STEP,
    }[row.algorithm]
    chunk = row.chunk or 0
    if not _LEAST_CHUNK <= chunk <= limit or chunk & (chunk - 1):
        raise _wrong(
            where,
            f"a chunk of {row.chunk} bytes; expected a power of two from {_LEAST_CHUNK} to {limit}",
        )


def _wrong(where: str, what: object) -> UsageError:
    return UsageError(
        f"{where}: {what}; correct it, or make the file anew with python -m allreduce.tune"
    )


for _row in TABLE:
    _check(_row, "the built-in table")
