"""Tuning: what is compared, and what becomes of times. Nothing is timed here."""

from __future__ import annotations

import pytest

from allreduce.comm.choice.choosing import Choice, Table
from allreduce.comm.choice.table import COPYING, Row
from allreduce.comm.choice.tuning import CUT, Cell, Outcome, cells, merged, rows_of, tables
from tests.harness import run_threads

KIB = 1 << 10
COLLECTIVES = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter", "broadcast"),
    "all_to_all",
)
BUILT_IN, FASTER = Choice("staged", 256 * KIB), Choice("staged", 64 * KIB, "streaming")
SMALL = Choice("small")


def outcome(
    collective: str = "reduce",
    parts: tuple[tuple[float, ...], ...] = ((2, 2, 2, 2), (1, 1, 1, 1)),
    *,
    members: int = 2,
    candidates: tuple[Choice, ...] = (BUILT_IN, FASTER),
    nbytes: int = 64 * KIB,
    crowded: bool = False,
) -> Outcome:
    cell = Cell(collective, nbytes, (nbytes // 2 + 1, nbytes), False, candidates)
    return Outcome("shared", members, crowded, cell, parts)


@pytest.mark.parametrize(
    ("transport", "members", "pulls"),
    [("shared", 2, False), ("shared", 2, True), ("shared", 64, True), ("tcp", 3, False)],
)
def test_what_is_compared_can_be_chosen(transport: str, members: int, pulls: bool) -> None:
    default = Table().choices(transport, members, pulls=pulls)
    plan = cells(default, transport, members)
    made = [table.choices(transport, members, pulls=pulls) for table in tables(transport, plan)]
    tried = {choice.algorithm for cell in plan for choice in cell.candidates}
    assert ("pulled" in tried) == pulls
    assert {cell.collective for cell in plan} == {*COLLECTIVES}
    for cell in plan:
        first, *others = cell.candidates
        assert first == default.choose(cell.collective, cell.nbytes, symmetric=cell.symmetric)
        assert others
        assert len(set(cell.candidates)) == len(cell.candidates)
        low, high = cell.bytes
        assert cell.nbytes * members <= 64 << 20
        assert high is None or low <= cell.nbytes <= high
        sizes = {*range(low, (high or low << 6) + 1, max(1, low // 3)), high or 1 << 40}
        stood_for = {default.choose(cell.collective, n, symmetric=cell.symmetric) for n in sizes}
        assert stood_for == {first}, (cell.collective, cell.bytes)
        for choice, choices in zip(cell.candidates, made, strict=False):
            found = choices.choose(cell.collective, cell.nbytes, symmetric=cell.symmetric)
            assert found == choice
        large = transport == "shared" and members == 2 and cell.nbytes >= 1 << 20
        if large and cell.collective in COPYING:
            part = cell.nbytes // (members if cell.collective in CUT else 1)
            assert {choice.streams(part) for choice in cell.candidates} == {True, False}


def test_only_what_is_clearly_faster_is_chosen() -> None:
    assert outcome().best == 1
    assert outcome(parts=((2, 2, 2, 2), (1, 1, 1, 1.95))).best == 0  # by 2.6 % once
    assert outcome(parts=((1.02,) * 4, (1,) * 4)).best == 0
    assert outcome(parts=((1.04,) * 4, (1,) * 4)).best == 1
    assert outcome(parts=((1,) * 4, (2,) * 4)).best == 0
    three = (BUILT_IN, FASTER, Choice("staged", 128 * KIB))
    assert outcome(parts=((3,) * 4, (2,) * 4, (1,) * 4), candidates=three).best == 2


def test_outcomes_become_rows() -> None:
    slower = ((1.0,) * 4, (2.0,) * 4)
    rows = rows_of([outcome("reduce"), outcome("gather"), outcome("broadcast", slower)])
    assert rows == [
        Row(
            *("shared", ("reduce", "gather"), "staged", (2, 2), (32 * KIB + 1, 64 * KIB), False),
            chunk=64 * KIB,
            stores="streaming",
        )
    ]
    assert Table(tuple(rows)).choices("shared", 2).choose("gather", 50000) == FASTER


def test_what_most_members_found_holds_for_fewer_of_them() -> None:
    rows = rows_of([outcome(members=2), outcome(members=8)])
    assert [row.members for row in rows] == [(2, 2), (3, 1024)]
    long = (BUILT_IN, Choice("staged", 512 * KIB))
    assert rows_of([outcome(members=8, candidates=long)])[0].members == (3, None)
    Table(tuple(rows)).choices("shared", 4000)  # a short chunk does not have to do for so many


def test_small_calls_stay_the_smallest() -> None:
    better, worse = ((2.0,) * 4, (1.0,) * 4), ((1.0,) * 4, (2.0,) * 4)
    candidates = (SMALL, BUILT_IN)
    two = outcome("all_reduce", better, candidates=candidates, nbytes=2 * KIB)
    four = outcome("all_reduce", worse, candidates=candidates, nbytes=4 * KIB)
    assert rows_of([two, four]) == []
    four = outcome("all_reduce", better, candidates=candidates, nbytes=4 * KIB)
    choices = Table(tuple(rows_of([two, four]))).choices("shared", 2)
    assert choices.choose("all_reduce", 1 * KIB) == SMALL
    assert choices.choose("all_reduce", 3 * KIB) == BUILT_IN


def test_new_rows_replace_those_of_the_same_members() -> None:
    old = [
        Row("shared", ("reduce",), "staged", (2, 2), crowded=False, chunk=4096, stores="ordinary"),
        Row("shared", ("reduce",), "staged", (2, 2), crowded=True, chunk=4096, stores="ordinary"),
        Row("shared", ("reduce",), "staged", (3, 64), chunk=4096, stores="ordinary"),
        Row("tcp", ("gather",), "direct", (2, 2), chunk=4096),
    ]
    same = outcome(parts=((1.0,) * 4, (1.0,) * 4))
    assert merged([same], old) == old[1:]
    assert merged([outcome(members=8, crowded=True)], old)[1:] == [old[0], old[1], old[3]]


def test_candidates_run_in_communicators_of_their_own() -> None:
    from allreduce.comm.choice.measuring import compare

    default = Table().choices("shared", 2)
    plan = [cell for cell in cells(default, "shared", 2) if cell.nbytes <= 64 * KIB]

    def run(comm):  # type: ignore[no-untyped-def]
        comms = [comm] * max(len(cell.candidates) for cell in plan)
        return [compare(comm, comms, cell, 0.0) for cell in plan]

    first, second = run_threads(run, 2)
    assert first == second  # all ranks decide alike
    assert [len(parts) for parts in first] == [len(cell.candidates) for cell in plan]
    assert all(seconds > 0 for parts in first for one in parts for seconds in one)
