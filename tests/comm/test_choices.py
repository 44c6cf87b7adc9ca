"""The table of choices: its defaults, what it refuses, its file, and that all members share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allreduce import _native
from allreduce.comm.choice import stored as stored_choices
from allreduce.comm.choice.checking import check
from allreduce.comm.choice.choosing import Choice, Table
from allreduce.comm.choice.table import TABLE, Row
from allreduce.errors import UsageError
from tests.cluster.processes import mpirun
from tests.harness import Result, run_ranks

KIB = 1 << 10
PAST = 4 << 20
NONE = (1 << 64) - 1  # no limit, as the native side has it
GOOD = Row(
    "shared", ("all_reduce",), "staged", bytes=(4097, None), chunk=64 * KIB, stores="ordinary"
)


@pytest.mark.parametrize(
    ("transport", "members", "collective", "nbytes", "symmetric", "expected"),
    [
        ("shared", 2, "barrier", 0, False, Choice("small")),
        ("shared", 2, "all_reduce", 4096, True, Choice("small")),
        ("shared", 2, "all_reduce", 4097, False, Choice("exchanged", 64 * KIB)),
        ("shared", 2, "all_reduce", 32 * KIB + 1, False, Choice("staged", 512 * KIB)),
        ("shared", 2, "all_reduce", 4097, True, Choice("direct", 256 * KIB, past=PAST)),
        ("shared", 8, "all_reduce", 1 << 28, False, Choice("staged", 512 * KIB)),
        ("shared", 2, "all_gather", 1 << 20, False, Choice("exchanged", 64 * KIB, past=PAST)),
        (
            *("shared", 3, "all_gather", 1 << 20, False),
            Choice("staged", 256 * KIB, "streaming", PAST),
        ),
        ("shared", 3, "reduce", 1 << 20, True, Choice("staged", 256 * KIB, past=PAST)),
        ("shared", 3, "all_to_all", None, False, Choice("staged", 256 * KIB, past=PAST)),
        ("tcp", 2, "all_reduce", 4096, False, Choice("small")),
        ("tcp", 2, "all_reduce", 256 * KIB, False, Choice("direct", 256 * KIB)),
        ("tcp", 2, "all_reduce", 256 * KIB + 1, False, Choice("chain", 256 * KIB)),
        ("tcp", 2, "gather", 256 * KIB + 1, False, Choice("direct", 256 * KIB)),
        ("tcp", 2, "send", 5000, False, Choice("direct", 256 * KIB)),
        ("mpi", 2, "all_reduce", 5000, False, Choice("mpi")),
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
    choices = Table().choices(transport, members)
    assert choices.choose(collective, nbytes, symmetric=symmetric) == expected


def test_the_built_in_rows_say_what_can_be_done() -> None:
    for number, row in enumerate(TABLE):
        check(row, f"row {number} of the built-in table")


def test_stored_rows_stand_before_the_built_in_ones() -> None:
    row = GOOD._replace(members=(2, 4), crowded=True)
    table = Table((row,), "here")
    assert table.digest != Table().digest == Table().digest
    for members, crowded, chunk in ((2, True, 64), (4, True, 64), (2, False, 512), (5, True, 512)):
        choices = table.choices("shared", members, crowded)
        assert choices.choose("all_reduce", 50000).chunk == chunk * KIB
    assert table.choices("shared", 2, True).choose("reduce", 5000).chunk == 256 * KIB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport": "shred"}, "unknown transport 'shred'.*did you mean 'shared'"),
        ({"algorithm": "chain"}, "unknown algorithm 'chain'"),
        ({"collectives": ("all_redcue",)}, "did you mean 'all_reduce'"),
        ({"collectives": ("barrier",)}, "unknown staged collective 'barrier'"),
        ({"members": (0, 2)}, "members from 0 to 2"),
        ({"bytes": (9, 3)}, "bytes from 9 to 3"),
        ({"chunk": None}, "a chunk of None bytes"),
        ({"chunk": 2048}, "a power of two from 4096 to 524288"),
        ({"chunk": 1 << 20}, "a power of two from 4096 to 524288"),
        ({"chunk": 12345}, "a power of two"),
        ({"stores": None}, "stores=None"),
        ({"stores": "stream"}, "did you mean 'streaming'"),
        ({"past": 0}, "past=0; expected a number of bytes, 1 or more"),
        (
            {"transport": "tcp", "algorithm": "chain", "stores": None, "past": 1},
            "on rows of the shared transport that are not small",
        ),
        ({"algorithm": "small", "stores": None}, "bytes up to None, but.*room for 4096"),
        ({"algorithm": "small", "stores": None, "bytes": (0, 9)}, "small has no chunks"),
        ({"algorithm": "direct", "chunk": 4096}, "stores='ordinary'; a staged row"),
        ({"algorithm": "pulled", "stores": None}, "unknown pulled collective 'all_reduce'"),
        (
            {"algorithm": "pulled", "collectives": ("gather",), "bytes": (9, None)},
            "bytes from 9; expected 4097 or more of a pulled row",
        ),
        ({"transport": "tcp", "algorithm": "chain", "crowded": True}, "shared transport only"),
        ({"algorithm": "exchanged", "stores": None}, "for other than 2 members"),
        (
            {"algorithm": "exchanged", "stores": None, "members": (2, 2), "chunk": 128 * KIB},
            "from 4096 to 65536",
        ),
        ({"transport": "tcp", "algorithm": "chain", "chunk": 1 << 21}, "to 1048576"),
    ],
)
def test_rows_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"here: row 2: .*{message}"):
        Table((GOOD, GOOD._replace(**change)), "here")


def test_what_is_stored_for_ordinary_arrays_does_not_hold_for_symmetric_ones() -> None:
    choices = Table((GOOD,), "here").choices("shared", 2)
    built_in = Table().choices("shared", 2)
    symmetric = [one.choose("all_reduce", 5000, symmetric=True) for one in (choices, built_in)]
    assert symmetric[0] == symmetric[1] == Choice("direct", 256 * KIB, past=PAST)
    own = Table((GOOD._replace(algorithm="direct", stores=None), GOOD), "here").choices("shared", 2)
    assert own.choose("all_reduce", 5000, symmetric=True).chunk == 64 * KIB


@pytest.mark.parametrize(
    ("members", "crowded", "collective", "nbytes", "algorithm"),
    [
        (2, False, "all_to_all", 1 << 28, "exchanged"),
        (3, False, "all_to_all", 4 << 20, "staged"),
        (3, False, "all_to_all", 5 << 20, "pulled"),
        (3, False, "gather", 1 << 28, "pulled"),
        (2, False, "all_gather", 1 << 28, "exchanged"),
        (2, True, "all_gather", 1 << 20, "exchanged"),
        (2, False, "reduce_scatter", 1 << 17, "exchanged"),
        (2, False, "reduce_scatter", 1 << 18, "staged"),
        (2, False, "gather", 5 << 20, "pulled"),
        (8, False, "broadcast", 1 << 28, "staged"),
        (3, True, "broadcast", 1 << 20, "pulled"),
        (2, False, "all_reduce", 1 << 28, "staged"),
    ],
)
def test_what_is_pulled(
    members: int, crowded: bool, collective: str, nbytes: int, algorithm: str
) -> None:
    choices = Table().choices("shared", members, crowded, pulls=True)
    assert choices.choose(collective, nbytes).algorithm == algorithm
    in_rings = "exchanged" if algorithm == "exchanged" else "staged"
    assert choices.choose(collective, nbytes, pulled=False).algorithm == in_rings


def test_what_cannot_be_pulled_goes_by_the_next_row() -> None:
    row = Row("shared", ("gather",), "pulled", bytes=(9999, None), chunk=8 * KIB)
    table = Table((row,), "here")
    allowed, forbidden = (table.choices("shared", 3, pulls=pulls) for pulls in (True, False))
    assert allowed.choose("gather", 9999) == Choice("pulled", 8 * KIB)
    for other in (
        allowed.choose("gather", 9998),
        allowed.choose("gather", 9999, pulled=False),
        forbidden.choose("gather", 9999),
    ):
        assert other == Choice("staged", 256 * KIB, past=PAST)
    assert allowed.choose("gather", 9999, symmetric=True).algorithm == "direct"


def test_rows_that_do_not_fit_the_members_are_refused() -> None:
    short = Table((GOOD._replace(chunk=4096),), "here")
    assert short.choices("shared", 64).choose("all_reduce", 5000).chunk == 4096
    with pytest.raises(UsageError, match="here: a staged chunk of 4096 bytes is too short for 65"):
        short.choices("shared", 65)
    early = Table((GOOD._replace(bytes=(0, 100)),), "here")
    with pytest.raises(UsageError, match="all_reduce would go small in other sizes"):
        early.choices("shared", 2)


@pytest.mark.parametrize(
    ("small", "band", "message"),
    [
        (4097, (NONE, 0, 0, 4096), "longer than a slot's page"),
        (0, (5000, 0, 0, 4096), "the last band has a limit"),
        (0, (NONE, 0, 0, 5000), "no power of two that the ring holds"),
        (0, (NONE, 0, 0, 1 << 20), "no power of two that the ring holds"),
        (0, (NONE, 100, 0, 4096), "a step is too short"),
        (0, (NONE, 0, 100, 4096), "only copies can be pulled"),
        (0, (NONE, 0, 0, -131072), "only two members exchange places, and a lap of them at most"),
    ],
)
def test_the_native_side_guards_its_memory(
    small: int, band: tuple[int, int, int, int], message: str
) -> None:
    limit, *chunks = band  # a negative one is of an exchange
    direct, pulled, staged = ((abs(chunk), False, NONE, chunk < 0) for chunk in chunks)
    with pytest.raises(ValueError, match=message):
        _native.Group(-1, 2, 2, [(1, small, [(limit, direct, pulled, staged)])])


def stored(folder: Path, *rows: Row, **facts: Any) -> Path:
    path = folder / "choices.json"
    stored_choices.write(path, rows, facts)
    return path


def test_a_file_gives_back_what_was_stored(tmp_path: Path) -> None:
    rows = (GOOD, *TABLE)
    path = stored(tmp_path / "new", *rows, cpu="a CPU", cores=2, date="2026-01-01")
    table = stored_choices.read(path)
    assert table.stored == rows
    assert table.source == str(path)
    assert [one.name for one in path.parent.iterdir()] == ["choices.json"]


def rows_file(**change: Any) -> dict[str, Any]:
    row = json.loads(json.dumps(GOOD._asdict()))
    return {"format": 1, "rows": [row, {**row, **change}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is damaged"),
        (b"\xff\x00", "it is damaged"),
        ("", "it is damaged"),
        ("[" * 100_000, "it is damaged"),
        ("[]", "its format is None, not 1"),
        ({"format": 2, "rows": []}, "its format is 2, not 1"),
        ({"format": 1}, "rows=None is no list"),
        ({"format": 1, "rows": [], "raws": []}, "unknown key 'raws'; did you mean 'rows'"),
        (rows_file(chunks=5), "row 2: unknown key 'chunks'; did you mean 'chunk'"),
        (rows_file(chunk="5"), "row 2: chunk='5' is not valid"),
        (rows_file(chunk=True), "row 2: chunk=True is not valid"),
        (rows_file(members=[2]), r"row 2: members=\[2\] is not valid"),
        (rows_file(bytes=5), "row 2: bytes=5 is not valid"),
        (rows_file(collectives=[]), r"row 2: collectives=\[\] is not valid"),
        (rows_file(past="no"), "row 2: past='no' is not valid"),
        (rows_file(chunk=5), "row 2: a chunk of 5 bytes"),
        ({"format": 1, "rows": [{}]}, "row 1: it has no 'transport'"),
        ({"format": 1, "rows": [3]}, "row 1: 3 is no row"),
    ],
)
def test_a_damaged_file_says_where(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError, match=f"choices.json: .*{message}"):
        stored_choices.read(path)


def test_which_file_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLREDUCE_CHOICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert stored_choices.current().source == "built-in"
    named = stored(tmp_path, GOOD)
    monkeypatch.setenv("ALLREDUCE_CHOICES", str(named))
    assert stored_choices.current().source == str(named)
    monkeypatch.setenv("ALLREDUCE_CHOICES", "built-in")
    assert stored_choices.current() == Table()
    monkeypatch.setenv("ALLREDUCE_CHOICES", str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match=r"cannot read the choices in .*none.json: No such file"):
        stored_choices.current()
    with stored_choices.override(Table((GOOD,), "ours")):
        assert stored_choices.current().source == "ours"
    monkeypatch.delenv("ALLREDUCE_CHOICES")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))  # which is no folder
    assert stored_choices.current() == Table()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    own = stored(tmp_path / "own" / "allreduce", GOOD)
    assert stored_choices.current().source == str(own)


def join_with_choices(transport: str, path: str) -> None:
    """Rank 1 names a table of its own, and says how far it came."""
    import os

    if os.environ.get("PMI_RANK", os.environ.get("ALLREDUCE_RANK")) == "1":
        os.environ["ALLREDUCE_CHOICES"] = path
    import allreduce as ar

    try:
        ar.init(transport=transport, timeout=30)
        os.write(1, b"joined\n")  # in one piece, whoever else writes
    except ar.errors.AllreduceError as error:
        os.write(1, f"{type(error).__name__}: {error}\n".encode())


def join(transport: str, path: Path, env: dict[str, str] | None = None) -> list[Result]:
    if transport == "mpi":
        mpirun(2, Path())
    launcher = "mpirun" if transport == "mpi" else "env"
    own = (transport, str(path))
    return run_ranks(join_with_choices, 2, arguments=own, env=env, launcher=launcher)


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical", "mpi"])
def test_all_members_have_to_have_the_same_table(transport: str, tmp_path: Path) -> None:
    path = stored(tmp_path, GOOD)
    results = join(transport, path, {"ALLREDUCE_CHOICES": "built-in"})
    assert not any(result.returncode for result in results), results
    said = sorted(line for result in results for line in result.stdout.splitlines())
    assert len(said) == 2, results
    for rank, text in enumerate(said):
        assert f"JoinError: [{transport}] rank {rank}: all ranks have to choose alike" in text
        assert "has the built-in table (hash" in text
        assert "rank 1 on " in text
        assert f"has the choices in {path} (hash" in text
        assert "ALLREDUCE_CHOICES" in text


def test_a_damaged_table_keeps_all_members_from_joining(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    path.write_text("{")
    first, second = join("shared", path)
    assert f"UsageError: [shared] rank 1: ALLREDUCE_CHOICES: {path}: it is damaged" in second.stdout
    assert "UsageError: [shared] rank 0: not joined: rank 1 has no choices" in first.stdout
    assert str(path) in first.stdout


def test_a_stored_table_in_force_is_logged_by_rank_0(tmp_path: Path) -> None:
    path = stored(tmp_path, GOOD)
    first, second = join("shared", path, {"ALLREDUCE_CHOICES": str(path)})
    assert first.stdout == second.stdout == "joined\n"
    assert f"choices: 1 stored row of {path} in force" in first.stderr
    assert "choices" not in second.stderr
