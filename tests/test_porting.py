"""docs/porting.md: every program of ours runs on two ranks, and those of mpi4py beside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.harness import run_ranks

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "porting.md").read_text()
PROGRAMS = re.findall(r"```python\n(# (\w+)\n.*?)```", PAGE, re.DOTALL)
OURS = [text for text, library in PROGRAMS if library == "allreduce"]
# What the page says that load() stands for.
LOAD = """
import numpy

def load():
    random = numpy.random.default_rng(0)
    x = random.normal(size=(150, 8)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32")
"""
# What each program has reached at its end, in the order of the page.
REACHED = (
    "assert total[0] == 1 and parts.shape == (2, 1000) and settings == {'lr': 0.1}\n"
    "assert x[0] == 0 and host.size == 2",
    "assert len(model.evaluate(x, y)) == 2",
    "assert 0 < loss < 4",
    "assert len(history.epoch) == 2 and 0 < loss < 4 and 0 <= accuracy <= 1",
)


def test_every_library_of_the_page_stands_beside_ours() -> None:
    libraries = [library for _, library in PROGRAMS]
    assert libraries[1::2] == ["allreduce"] * len(REACHED)
    assert libraries[::2] == ["mpi4py", "horovod", "torch", "tensorflow"]


@pytest.mark.parametrize("number", range(len(REACHED)))
def test_programs_run_on_two_ranks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for result in run_ranks(f"{LOAD}\n{OURS[number]}\n{REACHED[number]}\n", 2):
        assert result.returncode == 0, result.stderr


def test_the_program_of_mpi4py_does_the_same() -> None:
    pytest.importorskip("mpi4py")
    program = PROGRAMS[0][0] + REACHED[0].replace("host.size", "host.Get_size()")
    (result,) = run_ranks(program, 2, launcher="mpirun")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("text", "library"), PROGRAMS)
def test_programs_are_python(text: str, library: str) -> None:
    ast.parse(text, library)
