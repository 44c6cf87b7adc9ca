"""What `python -m allreduce.tune` tries, and what it makes of the times: data in, rows out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from allreduce.comm.choice.choosing import Choice, Choices, Table
from allreduce.comm.choice.table import ALGORITHMS, COPYING, Row

KIB = 1 << 10
MIB = 1 << 20
GAIN = 1.03  # a candidate less than 3 % faster could be so by chance
_TRIED = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"),
    *("gather", "scatter"),
)
CUT = ("reduce_scatter", "scatter", "all_to_all")  # whose input has a part for each member
# The size that is measured, and the sizes that it stands for, as far as calls go the same way now.
_SMALL = ((2 * KIB, (KIB + 1, 2 * KIB)), (4 * KIB, (2 * KIB + 1, 4 * KIB)))
_LARGE = (
    (64 * KIB, (4 * KIB + 1, 256 * KIB)),
    (1 * MIB, (256 * KIB + 1, 4 * MIB)),
    (16 * MIB, (4 * MIB + 1, None)),
)
_TOGETHER = 64 * MIB  # bytes of all members' inputs, which one output may have to hold
_STAGED = tuple(
    Choice("staged", chunk * KIB, stores)
    for chunk in (64, 128, 256, 512)
    for stores in ("ordinary", "streaming")
)
_PULLED = tuple(Choice("pulled", chunk * KIB) for chunk in (256, 1024, 4096))
_EXCHANGED = tuple(Choice("exchanged", chunk * KIB) for chunk in (16, 64))
_DIRECT = tuple(Choice("direct", chunk * KIB) for chunk in (64, 256, 1024))
_HOPS = tuple(
    Choice(algorithm, chunk * KIB) for algorithm in ("direct", "chain") for chunk in (64, 256, 1024)
)
_LINE = 64  # bytes; what a member has of a staged chunk at least
_PAST = 256 * KIB  # from where on copies are tried past the caches, where they do not go there


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Args:
        collective: Of which collective.
        nbytes: Of how many bytes, as the table of choices counts them.
        bytes: For how many bytes, from and to, its outcome holds.
        symmetric: Whether its arrays lie in symmetric memory.
        candidates: What is compared; first what the built-in table chooses.
    """

    collective: str
    nbytes: int
    bytes: tuple[int, int | None]
    symmetric: bool
    candidates: tuple[Choice, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Args:
        transport: Where it was measured,
        members: between how many members,
        crowded: and whether these outnumbered their cores.
        cell: What was compared.
        parts: Each candidate's median seconds in each part of the rounds.
    """

    transport: str
    members: int
    crowded: bool
    cell: Cell
    parts: tuple[tuple[float, ...], ...]

    @property
    def best(self) -> int:
        """The fastest candidate's position, if it is clearly faster than the default; else 0.

        The fastest of many owes that to luck, too. Of two equal ones, it takes 1 in 70 that all
        four parts of one are faster than all of the other.
        """
        found = min(range(len(self.parts)), key=self.seconds)
        return found if min(self.parts[0]) > GAIN * max(self.parts[found]) else 0

    def seconds(self, candidate: int) -> float:
        """Return what a candidate took, in the middle."""
        return statistics.median(self.parts[candidate])


def cells(choices: Choices, transport: str, members: int) -> list[Cell]:
    """Return what is worth comparing between so many members; the commonest first."""
    most = _TOGETHER // members
    found = []
    if transport == "shared":
        limits = [("all_reduce", nbytes, band, False) for nbytes, band in _SMALL]
        small = [_cell(choices, *one, _STAGED[4:5]) for one in limits]
        found += [cell for cell in small if cell is not None]
    carried = ALGORITHMS[transport]
    private = _STAGED + _PULLED if choices.pulls else _STAGED
    private += _EXCHANGED if members == 2 else ()
    kinds = [(False, _HOPS)] if transport == "tcp" else [(True, _DIRECT), (False, private)]
    for nbytes, band in _LARGE:
        size = min(nbytes, most)
        for symmetric, tried in kinds:
            if symmetric and nbytes < MIB:
                continue
            for collective in _TRIED:
                fit = [one for one in tried if collective in carried[one.algorithm]]
                if not fit:
                    continue
                cell = _cell(choices, collective, size, band, symmetric, fit)
                if cell is None:
                    continue
                found.append(_with_other_copies(cell, members) if transport == "shared" else cell)
    return found


def _cell(
    choices: Choices,
    collective: str,
    nbytes: int,
    band: tuple[int, int | None],
    symmetric: bool,
    tried: Iterable[Choice],
) -> Cell | None:
    """Make a comparison, unless calls of the band's sizes go another way than those measured."""
    default = choices.choose(collective, nbytes, symmetric=symmetric)
    alike = choices.alike(collective, nbytes, band, symmetric=symmetric)
    if alike is None:
        return None
    others = (replace(one, past=default.past) for one in tried)
    candidates = (default, *(one for one in others if one != default))
    return Cell(collective, nbytes, alike, symmetric, candidates)


def _with_other_copies(cell: Cell, members: int) -> Cell:
    """Add the default with its copies past the caches, or through them, whatever it does not."""
    default = cell.candidates[0]
    nbytes = cell.nbytes // (members if cell.collective in CUT else 1)
    if cell.collective not in COPYING or nbytes < _PAST:
        return cell
    other = replace(default, past=None if default.streams(nbytes) else _PAST)
    return replace(cell, candidates=(*cell.candidates, other))


def tables(transport: str, plan: Sequence[Cell]) -> list[Table]:
    """Return tables by which all cells go the way of their first candidate, of their second ..."""
    most = max(len(cell.candidates) for cell in plan)
    made = [Table()]
    for position in range(1, most):
        rows = [
            _row(transport, cell.candidates[position], (cell.collective,), cell.bytes)
            for cell in sorted(plan, key=lambda cell: not cell.symmetric)  # what holds for these
            if position < len(cell.candidates)
        ]
        made.append(Table(tuple(rows), "python -m allreduce.tune"))
    return made


def _row(
    transport: str,
    choice: Choice,
    collectives: tuple[str, ...],
    band: tuple[int, int | None],
    members: tuple[int, int | None] = (1, None),
    crowded: bool | None = None,
) -> Row:
    staged = choice.algorithm == "staged"
    members = (2, 2) if choice.algorithm == "exchanged" else members
    return Row(
        *(transport, collectives, choice.algorithm, members, band, crowded),
        chunk=choice.chunk or None,
        stores=choice.stores if staged else None,
        past=choice.past,
    )


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the rows that say what was found better than the built-in table.

    Outcomes with the most members hold for more of them, too, but those with 2 for 2 only.
    """
    largest = max((one.members for one in outcomes), default=0)
    found: dict[Row, list[str]] = {}
    for one in outcomes:
        if not one.best or not _reaches(one, outcomes):
            continue
        choice = one.cell.candidates[one.best]
        members: tuple[int, int | None] = (one.members, one.members)
        if 2 < one.members == largest:
            short = choice.algorithm == "staged" and choice.chunk < 256 * KIB
            members = (3, choice.chunk // _LINE if short else None)
        crowded = one.crowded if one.transport == "shared" else None
        row = _row(one.transport, choice, (), one.cell.bytes, members, crowded)
        found.setdefault(row, []).append(one.cell.collective)
    return [
        _row(row.transport, Choice.of(row), tuple(names), row.bytes, row.members, row.crowded)
        for row, names in found.items()
    ]


def _reaches(one: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """Say whether larger small calls did better in another way, too: the small are the smallest."""
    if one.cell.candidates[0].algorithm != "small":
        return True
    larger = [
        other
        for other in outcomes
        if other.cell.candidates[0].algorithm == "small"
        and (other.transport, other.members) == (one.transport, one.members)
        and other.cell.nbytes > one.cell.nbytes
    ]
    return all(other.best for other in larger)


def merged(outcomes: Sequence[Outcome], stored: Sequence[Row]) -> list[Row]:
    """Return what the outcomes give, and the stored rows of what they do not speak of."""
    kept = [row for row in stored if not any(_speaks(one, row) for one in outcomes)]
    return [*rows_of(outcomes), *kept]


def _speaks(one: Outcome, row: Row) -> bool:
    least, most = row.members
    return (
        one.transport == row.transport
        and least <= one.members
        and (most is None or one.members <= most)
        and row.crowded in (None, one.crowded)
    )
