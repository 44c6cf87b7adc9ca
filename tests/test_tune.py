"""`python -m allreduce.tune`: from ranks it starts, or is one of, to a table that loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allreduce.comm.choice import stored as stored_choices
from allreduce.tune import app
from tests.cluster.processes import run

TUNE = [sys.executable, "-m", "allreduce.tune"]
START_AND_END_SECONDS = 10
LAUNCH = [sys.executable, "-m", "allreduce.run", "-n"]


def test_it_starts_ranks_measures_and_stores(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    result = run([*TUNE, "-n", "2", "--seconds", "0.1", "--output", str(path)], deadline=60)
    assert result.code == 0, result.err
    assert "2 shared" in result.out
    assert "comparisons; --seconds gives more" in result.err
    assert f"stored in {path}\nset ALLREDUCE_CHOICES={path} on all ranks" in result.out
    stored_choices.read(path)
    found = json.loads(path.read_text())
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["date"].startswith("20")


@pytest.mark.torture
def test_it_measures_between_the_ranks_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    path.write_text("{")
    command = [*LAUNCH, "2", "-m", "allreduce.tune", "--transport", "tcp", "--seconds", "0.1"]
    result = run([*command, "--output", str(path)], deadline=60)
    assert result.code == 0, result.err
    assert "2 tcp" in result.out
    assert "what was stored is replaced" in result.err
    stored_choices.read(path)
    result = run([*LAUNCH, "2", "-m", "allreduce.tune", "-n", "2"], deadline=60)
    assert result.code == 1
    assert "the ranks are there already" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--transport", "udp"], "unknown transport 'udp'"),
        (["-n", "1"], "should be greater than or equal to 2"),
        (["--seconds", "0"], "should be greater than or equal to 0.1"),
    ],
)
def test_what_it_refuses(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_place_where_nothing_can_be_stored_is_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path, f"[tune] {tmp_path} is no file that could be replaced; name another"),
        (tmp_path / "file" / "x.json", f"[tune] nothing can be stored in {tmp_path / 'file'}: "),
        (Path("/proc/none/x.json"), "[tune] nothing can be stored in /proc/none: No such file"),
    ):
        result = CliRunner().invoke(app, ["--output", str(path)])
        assert result.exit_code == 1
        assert message in result.stderr


@pytest.mark.torture
def test_under_mpirun_within_its_time(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    mpirun = str(Path(sys.executable).parent / "mpirun")
    command = [mpirun, "-n", "2", *TUNE, "--transport", "shared", "--seconds", "5"]
    result = run([*command, "--output", str(path)], deadline=60)
    assert result.code == 0, result.err
    assert 5 <= result.seconds <= 5 + START_AND_END_SECONDS
    stored_choices.read(path)
    result = run([mpirun, "-n", "2", *TUNE, "--transport", "mpi"], deadline=60)
    assert "there is nothing to choose on the mpi transport" in result.err


@pytest.mark.torture
def test_without_a_word_of_seconds_it_takes_less_than_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    result = run([*TUNE, "--output", str(path)], deadline=90)
    assert result.code == 0, result.err
    assert result.seconds < 60
    stored_choices.read(path)
