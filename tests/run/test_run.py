"""The launcher, with real ranks: how they start, what they print, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.processes import run
from tests.run.launches import JOIN, LAUNCH, Write, launch


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_join_and_each_line_has_its_rank(script: Write, size: int) -> None:
    path = script(JOIN + "print(world.size, sys.argv[1:], 'ALLREDUCE_JOINED' in os.environ)")
    result = launch(size, path, "a", "--b", "-n")
    assert result.code == 0, result.err
    expected = [f"[{rank}] {size} ['a', '--b', '-n'] {size > 1}" for rank in range(size)]
    assert sorted(result.out.splitlines()) == expected
    assert result.err.count("ranks through leader" if size > 1 else "rank through leader") == 1


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_job.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run([*LAUNCH, "-n", "2", "-m", "some_job", "--x", "-m"])
    lines = sorted(result.out.splitlines())
    assert lines == ["[0] __main__ ['--x', '-m']", "[1] __main__ ['--x', '-m']"], result.err


def test_streams_stay_apart_and_lines_whole(script: Write) -> None:
    path = script(
        """
        import os, sys, time
        for number in range(200):
            for part in (b"line ", b"%d" % number, b"\\n"):
                os.write(1, part)
                os.write(2, part)
        os.write(1, b"no newline at the end")
        """
    )
    result = launch(3, path)
    for rank in range(3):
        mine = [line for line in result.out.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] line {n}" for n in range(200)] + [
            f"[{rank}] no newline at the end"
        ]
    assert sorted(result.err.splitlines()) == sorted(
        f"[{rank}] line {n}" for rank in range(3) for n in range(200)
    )


def test_colours_are_kept_out(script: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = launch(1, script("from rich import print; print('[red]plain[/red]')"))
    assert result.out == "[0] plain\n"


def test_nothing_arrives_on_standard_input(script: Write) -> None:
    assert launch(2, script("print(repr(input()))")).code == 1


def test_a_job_within_a_job(script: Write, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(JOIN + "print('inner', world.rank, world.size)")
    path = script(
        f"""
        import subprocess, sys
        from allreduce import cluster
        world = cluster.join()
        if world.rank == 0:
            command = [sys.executable, "-m", "allreduce.run", "-n", "3", {str(inner)!r}]
            sys.exit(subprocess.run(command).returncode)
        """
    )
    result = launch(2, path)
    assert result.code == 0, result.err
    expected = [f"[0] [{rank}] inner {rank} 3" for rank in range(3)]
    assert sorted(result.out.splitlines()) == expected


def test_a_missing_script_is_told_before_anything_starts() -> None:
    result = run([*LAUNCH, "-n", "2", "absent.py"])
    assert result.code == 2
    assert "absent.py" in result.err


def test_a_folder_is_run_by_its_main_file_or_refused(tmp_path: Path) -> None:
    result = run([*LAUNCH, "-n", "2", str(tmp_path)])
    assert (result.code, result.out) == (2, "")
    assert "is a folder without a __main__.py" in " ".join(result.err.split()).replace(" │ │ ", " ")
    (tmp_path / "__main__.py").write_text("print('ran')")
    result = run([*LAUNCH, "-n", "2", str(tmp_path)])
    assert (result.code, sorted(result.out.splitlines())) == (0, ["[0] ran", "[1] ran"])


@pytest.mark.parametrize("interpreter", ["python3", sys.executable])
def test_an_interpreter_before_the_script_is_to_be_left_out(interpreter: str) -> None:
    result = run([*LAUNCH, "-n", "2", interpreter, "absent.py"])
    assert result.code == 2
    assert "leave it out" in result.err


@pytest.mark.parametrize("size", ["0", "-1", "two"])
def test_impossible_sizes(size: str, script: Write) -> None:
    assert run([*LAUNCH, "-n", size, str(script(""))]).code == 2


def test_an_invalid_setting_is_one_line(script: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TIMEOUT", "soon")
    result = run([*LAUNCH, "-n", "2", str(script(""))], {"ALLREDUCE_TIMEOUT": "soon"})
    assert result.code == 1
    assert "ALLREDUCE_TIMEOUT='soon' is not valid" in result.err
    assert "Traceback" not in result.err


def test_an_unknown_transport_is_refused_once_and_before_ranks_start(script: Write) -> None:
    path = script("print('started')")
    result = run([*LAUNCH, "-n", "2", str(path)], {"ALLREDUCE_TRANSPORT": "sharde"})
    assert (result.code, result.out) == (1, "")
    told = r"\[allreduce\.run\] ALLREDUCE_TRANSPORT: unknown transport 'sharde': .* 'shared'\?\n"
    assert re.fullmatch(told, result.err), result.err


def test_many_ranks_start_and_meet(script: Write) -> None:
    result = launch(8, script(JOIN + "world.exchange('all', b'', 20)"))
    assert result.code == 0, result.err


@pytest.mark.parametrize(("ranks", "files"), [(60, 128), (3, 24), (3, 20)])
def test_more_ranks_than_files_may_be_open_is_one_line(
    script: Write, ranks: int, files: int
) -> None:
    command = " ".join([*LAUNCH, "-n", str(ranks), str(script(""))])
    result = run(["bash", "-c", f"ulimit -n {files}; exec {command}"])
    assert result.code == 1
    (line,) = result.err.splitlines()
    assert line.startswith(f"[allreduce.run] cannot start {ranks} ranks: it needs ")
    assert f"are left of the {files} that ulimit -n allows" in line


def test_a_slow_reader_gets_everything(script: Write) -> None:
    path = script("import os\nfor n in range(30000): os.write(1, b'%099d\\n' % n)")
    command = [*LAUNCH, "-n", "1", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        time.sleep(0.5)
        lines = process.stdout.read().splitlines()
        assert process.wait(25) == 0
    assert [int(line.split()[1]) for line in lines] == list(range(30000))
