"""The table of choices: its results, and native code that supports all of them."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from allreduce import _native
from allreduce.comm.selection.choosing import choices_for
from allreduce.comm.selection.table import TABLE, Row
from tests.comm.ranks.tables import before_the_table

KIB = 1 << 10
PAST = 4 << 20
NONE = (1 << 64) - 1  # no limit, as the native side has it


class Choice(NamedTuple):
    """The part of a row that says how a call is carried out."""

    algorithm: str
    chunk: int = 0
    stores: str = "ordinary"
    past: int | None = None

    @classmethod
    def of(cls, row: Row) -> Choice:
        return cls(row.algorithm, row.chunk, row.stores, row.past)


@pytest.mark.parametrize(
    ("transport", "members", "collective", "nbytes", "symmetric", "expected"),
    [
        ("shared", 2, "barrier", 0, False, Choice("eager")),
        ("shared", 2, "all_reduce", 4096, True, Choice("eager")),
        ("shared", 2, "all_reduce", 4097, False, Choice("pairwise", 64 * KIB)),
        ("shared", 2, "all_reduce", 32 * KIB + 1, False, Choice("staged", 512 * KIB)),
        ("shared", 2, "all_reduce", 4097, True, Choice("direct", 256 * KIB, past=PAST)),
        ("shared", 8, "all_reduce", 1 << 28, False, Choice("staged", 512 * KIB)),
        ("shared", 2, "all_gather", 1 << 20, False, Choice("pairwise", 64 * KIB, past=PAST)),
        (
            *("shared", 3, "all_gather", 1 << 20, False),
            Choice("staged", 256 * KIB, "streaming", PAST),
        ),
        ("shared", 3, "reduce", 1 << 20, True, Choice("staged", 256 * KIB, past=PAST)),
        ("shared", 3, "all_to_all", None, False, Choice("staged", 256 * KIB, past=PAST)),
        ("tcp", 2, "all_reduce", 4096, False, Choice("eager")),
        ("tcp", 2, "all_reduce", 256 * KIB, False, Choice("direct", 256 * KIB)),
        ("tcp", 2, "all_reduce", 256 * KIB + 1, False, Choice("chain", 256 * KIB)),
        ("tcp", 2, "gather", 256 * KIB + 1, False, Choice("direct", 256 * KIB)),
        ("tcp", 2, "send", 5000, False, Choice("direct", 256 * KIB)),
    ],
)
def test_defaults(
    transport: str,
    members: int,
    collective: str,
    nbytes: int | None,
    symmetric: bool,
    expected: Choice,
) -> None:
    choices = choices_for(transport, members)
    assert Choice.of(choices.choose(collective, nbytes, symmetric=symmetric)) == expected


@pytest.mark.parametrize("pulls", [True, False])
@pytest.mark.parametrize("crowded", [True, False])
@pytest.mark.parametrize("members", [1, 2, 3, 64])
def test_native_code_takes_the_table(members: int, crowded: bool, pulls: bool) -> None:
    choices = choices_for("shared", members, crowded, pulls=pulls)
    assert choices.native  # which checks chunks and sizes


def test_the_table_fits_tcp() -> None:
    """No row exceeds kEager and kMaxChunk in tcp_protocol.h."""
    for row in TABLE:
        if row.transport == "tcp" and row.algorithm == "eager":
            assert row.bytes[1] is not None
            assert row.bytes[1] <= 4 << 10
        elif row.transport == "tcp":
            assert 0 < row.chunk <= 1 << 20


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("members", [2, 3])
def test_small_calls_are_the_smallest(transport: str, symmetric: bool, members: int) -> None:
    choices = choices_for(transport, members, pulls=True)
    limits = sorted({row.bytes[1] for row in TABLE if row.bytes[1] is not None})
    sizes = sorted({0, NONE, *limits, *(limit + 1 for limit in limits)})
    names = {name for row in TABLE if row.transport == transport for name in row.collectives}
    for collective in names - {"barrier"}:
        chosen = [choices.choose(collective, n, symmetric=symmetric).algorithm for n in sizes]
        small = chosen.count("eager")
        assert small > 0
        assert chosen[:small] == ["eager"] * small


@pytest.mark.parametrize(
    ("members", "crowded", "collective", "nbytes", "algorithm"),
    [
        (2, False, "all_to_all", 1 << 28, "pairwise"),
        (3, False, "all_to_all", 4 << 20, "staged"),
        (3, False, "all_to_all", 5 << 20, "cross_process"),
        (3, False, "gather", 1 << 28, "cross_process"),
        (2, False, "all_gather", 1 << 28, "pairwise"),
        (2, True, "all_gather", 1 << 20, "pairwise"),
        (2, False, "reduce_scatter", 1 << 17, "pairwise"),
        (2, False, "reduce_scatter", 1 << 18, "staged"),
        (2, False, "gather", 5 << 20, "cross_process"),
        (8, False, "broadcast", 1 << 28, "staged"),
        (3, True, "broadcast", 1 << 20, "cross_process"),
        (2, False, "all_reduce", 1 << 28, "staged"),
    ],
)
def test_what_goes_cross_process(
    members: int, crowded: bool, collective: str, nbytes: int, algorithm: str
) -> None:
    choices = choices_for("shared", members, crowded, pulls=True)
    assert choices.choose(collective, nbytes).algorithm == algorithm
    in_rings = "pairwise" if algorithm == "pairwise" else "staged"
    assert choices.choose(collective, nbytes, cross_process=False).algorithm == in_rings


def test_what_cannot_go_cross_process_goes_by_the_next_row() -> None:
    row = Row("shared", ("gather",), "cross_process", bytes=(9999, None), chunk=8 * KIB)
    with before_the_table(row):
        allowed, forbidden = (choices_for("shared", 3, pulls=pulls) for pulls in (True, False))
    assert Choice.of(allowed.choose("gather", 9999)) == Choice("cross_process", 8 * KIB)
    for other in (
        allowed.choose("gather", 9998),
        allowed.choose("gather", 9999, cross_process=False),
        forbidden.choose("gather", 9999),
    ):
        assert Choice.of(other) == Choice("staged", 256 * KIB, past=PAST)
    assert allowed.choose("gather", 9999, symmetric=True).algorithm == "direct"


@pytest.mark.parametrize(
    ("small", "band", "message"),
    [
        (4097, (NONE, 0, 0, 4096), "longer than a slot's page"),
        (0, (5000, 0, 0, 4096), "the last band has a limit"),
        (0, (NONE, 0, 0, 5000), "no power of two that the ring holds"),
        (0, (NONE, 0, 0, 1 << 20), "no power of two that the ring holds"),
        (0, (NONE, 100, 0, 4096), "a step is too short"),
        (0, (NONE, 0, 100, 4096), "only copies can read other"),
        (0, (NONE, 0, 0, -131072), "only two members exchange places, and a lap of them at most"),
    ],
)
def test_the_native_side_guards_its_memory(
    small: int, band: tuple[int, int, int, int], message: str
) -> None:
    limit, *chunks = band  # a negative one is of an exchange
    direct, cross_process, staged = ((abs(chunk), False, NONE, chunk < 0) for chunk in chunks)
    with pytest.raises(ValueError, match=message):
        _native.Choices(2, [(1, small, [(limit, direct, cross_process, staged)])])
