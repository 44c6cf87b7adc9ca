"""Comparisons with peers: ratios within a run, medians over runs, tables, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measure.contest import EMPTY, ORDINARY, PRIVATE_PROBE, PROBE, Timing
from measure.revision import Revision
from reports import comparison, picture
from reports.comparison import Run, compare, type_rates

MIB = 1 << 20
NOW = Revision("2026-01-01T00:00:00Z", "abc1234")


def _timing(contestant: str, median: float, *, dtype: str = "float32", nbytes: int = MIB) -> Timing:
    return Timing("all_reduce", dtype, 2, nbytes, contestant, 10, median, 2 * median)


def _run(peer: str, theirs: float, empty: float) -> Run:
    ours = [_timing(EMPTY, empty), _timing(ORDINARY, 2 * empty), _timing(PROBE, empty / 2)]
    return Run(peer, f"{peer} 1.0", [*ours, _timing(peer, theirs)], NOW)


def test_ratios_stay_within_a_run() -> None:
    fast, slow = compare([_run("MPICH", 8e-4, 1e-4), _run("gloo", 8e-4, 2e-4)])
    assert (fast.peer, fast.per_empty, fast.per_ordinary) == ("MPICH", 8, 4)
    assert (slow.peer, slow.per_empty, slow.per_ordinary) == ("gloo", 4, 2)
    assert (fast.empty_of_limit, fast.ordinary_of_limit) == (0.5, 0.25)
    assert (fast.collective, fast.ranks, fast.nbytes) == ("all_reduce", 2, MIB)


def test_what_could_be_had_on_private_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    run = _run("MPICH", 8e-4, 1e-4)
    run = Run(run.peer, run.about, [*run.timings, _timing(PRIVATE_PROBE, 1.6e-4)], NOW)
    (one,) = compare([run])
    assert one.per_private == pytest.approx(5)  # where ours has 4
    assert one.ordinary_of_private == pytest.approx(0.8)
    comparison.print_comparisons([run])
    assert "8.00 / 4.00 (5.00)" in capsys.readouterr().out


def test_what_was_not_measured_has_no_ratio() -> None:
    (one,) = compare([Run("MLX", "", [_timing(ORDINARY, 1e-4), _timing("MLX", 3e-4)], NOW)])
    assert one.per_ordinary == pytest.approx(3)
    assert one.per_empty is one.empty_of_limit is one.ordinary_of_limit is None


def test_types_count_elements() -> None:
    """At equal bytes and equal time, half as wide elements are twice as many per second."""
    timings = [_timing(EMPTY, 1e-4), _timing(EMPTY, 1e-4, dtype="float16")]
    (rate,) = type_rates(timings)
    assert (rate.dtype, rate.contestant) == ("float16", EMPTY)
    assert rate.rate == pytest.approx(2)


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    small = [_timing(EMPTY, 1e-6, nbytes=8), _timing("gloo", 3e-6, nbytes=8)]
    runs = [_run("MPICH", 8e-4, 1e-4), _run("gloo", 8e-4, 2e-4), Run("gloo", "", small, NOW)]
    comparison.print_comparisons(runs)
    ratios, times = capsys.readouterr().out.split("all_reduce, float32, 2 ranks: ")[1:]
    lines = [[cell.strip() for cell in line.split("  ") if cell] for line in ratios.splitlines()]
    assert lines[1:] == [
        ["bytes", "MPICH", "gloo", "of the limit"],
        ["8 B", "3.00 / -", "- / -"],
        ["1 MiB", "8.00 / 4.00", "4.00 / 2.00", "50 % / 25 %"],
    ]
    assert "150.0 µs / 300.0 µs" in times  # ours on comm.empty memory, the median of both runs


def test_files(tmp_path: Path) -> None:
    runs = [_run("MPICH", 8e-4, 1e-4), Run("", "", [_timing(EMPTY, 1e-4, dtype="float32")], NOW)]
    comparison.save(runs, tmp_path / "results" / "peers", "ours and peers")
    written = json.loads((tmp_path / "results" / "peers.json").read_text())
    assert written["title"] == "ours and peers"
    assert written["machine"]["cores"] > 0
    assert [run["about"] for run in written["runs"]] == ["MPICH 1.0", ""]
    assert [run["revision"]["commit"] for run in written["runs"]] == ["abc1234"] * 2
    assert [each["per_empty"] for each in written["comparisons"]] == [8]
    assert (tmp_path / "results" / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_a_crowded_panel_is_parted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: dict[str, set[str]] = {}

    def curves(panels: dict[str, dict[str, object]], path: Path, title: str) -> None:
        drawn.update({name: set(curves_of) for name, curves_of in panels.items()})

    monkeypatch.setattr(picture, "curves", curves)
    peers = {"Open MPI", "MPICH", "Intel MPI", "gloo", "JAX"}
    timings = [_timing(name, 1e-4) for name in (EMPTY, ORDINARY, PROBE, PRIVATE_PROBE, *peers)]
    comparison.draw(timings, tmp_path, "")
    assert drawn == {
        "all_reduce, 2 ranks: libraries": {EMPTY, ORDINARY, *peers},
        "all_reduce, 2 ranks: types and probes": {EMPTY, ORDINARY, PROBE, PRIVATE_PROBE},
    }


def test_other_cases_are_kept(tmp_path: Path) -> None:
    first, gloo = _run("MPICH", 8e-4, 1e-4), _run("gloo", 8e-4, 2e-4)
    timings = [_timing(EMPTY, 1e-6, nbytes=8), _timing("MPICH", 3e-6, nbytes=8)]
    small = Run("MPICH", "", timings, Revision("earlier", "def5678"))
    assert comparison.kept(tmp_path / "peers", [first]) == []
    comparison.save([first, gloo, small], tmp_path / "peers", "ours and peers")
    again = _run("MPICH", 9e-4, 1e-4)
    assert comparison.kept(tmp_path / "peers", [again]) == [gloo, small]
    written = json.loads((tmp_path / "peers.json").read_text())
    written["machine"]["cores"] += 1
    (tmp_path / "peers.json").write_text(json.dumps(written))
    with pytest.raises(SystemExit, match="another machine's figures"):
        comparison.kept(tmp_path / "peers", [again])
