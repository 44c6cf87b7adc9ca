"""Which kernels NumPy's BLAS is told to take, and that it takes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from allreduce.openblas import VARIABLE, choice
from tests.harness import clean_environment, run_commands, script_of

ZEN_3 = {"vendor_id": "AuthenticAMD", "cpu family": "25", "flags": "fpu avx avx2 fma"}
ZEN_4 = {**ZEN_3, "flags": "fpu avx avx2 fma avx512f avx512dq"}
ZEN_5 = {**ZEN_4, "cpu family": "26"}
INTEL = {**ZEN_4, "vendor_id": "GenuineIntel"}


def cpuinfo(folder: Path, *processors: dict[str, str]) -> Path:
    blocks = ("".join(f"{k}\t: {v}\n" for k, v in each.items()) for each in processors)
    place = folder / "cpuinfo"
    place.write_text("\n".join(blocks))
    return place


@pytest.mark.parametrize(
    ("processors", "kernels"),
    [
        ((ZEN_4, ZEN_4), {VARIABLE: "Haswell"}),
        ((ZEN_3, ZEN_4), {}),
        ((ZEN_5,), {}),
        ((INTEL,), {}),
        (({},), {}),
    ],
)
def test_only_zen_4_gets_other_kernels(
    processors: tuple[dict[str, str], ...], kernels: dict[str, str], tmp_path: Path
) -> None:
    assert choice({}, cpuinfo(tmp_path, *processors)) == kernels


def test_the_users_choice_stays(tmp_path: Path) -> None:
    assert choice({VARIABLE: "Zen"}, cpuinfo(tmp_path, ZEN_4)) == {}


def test_a_system_that_tells_nothing_of_its_processor_has_its_own_choice(tmp_path: Path) -> None:
    assert choice({}, tmp_path / "none") == {}


def _loaded() -> None:
    import threadpoolctl

    import allreduce as ar

    ar.nn.Dense(1)  # NumPy is there, at the latest now
    print(*(one.get("architecture") for one in threadpoolctl.threadpool_info()))


def test_numpy_takes_the_kernels_that_were_chosen() -> None:
    plain = {k: v for k, v in clean_environment().items() if k != VARIABLE}
    chosen = choice({})
    command = [sys.executable, "-c", script_of(_loaded)]
    own, told = run_commands([command] * 2, [plain, {**plain, VARIABLE: "Nehalem"}], 60)
    if "Nehalem" not in told.stdout:
        pytest.skip(f"NumPy's BLAS has {told.stdout.strip() or 'no name'}, and no such kernels")
    assert chosen.get(VARIABLE, "") in own.stdout
    assert own.stdout.strip() != "Nehalem"
