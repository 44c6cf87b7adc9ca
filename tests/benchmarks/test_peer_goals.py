"""The table of goals against peers."""

from __future__ import annotations

from pathlib import Path

import peer_goals
from measure.contest import EMPTY, ORDINARY, PRIVATE_PROBE, Timing
from measure.revision import Revision
from reports import comparison
from reports.comparison import Run

MIB = 1 << 20


def _run(collective: str, nbytes: int, theirs: float) -> Run:
    took = {EMPTY: 1e-4, ORDINARY: 2e-4, PRIVATE_PROBE: 3e-4, "MPICH": theirs}
    timings = [
        Timing(collective, "float32", 2, nbytes, name, 10, seconds, seconds)
        for name, seconds in took.items()
    ]
    return Run("MPICH", "", timings, Revision("2026-01-01T00:00:00Z", "abc1234"))


def test_what_falls_short_is_bold(tmp_path: Path) -> None:
    runs = [_run("all_reduce", MIB, 8e-4), _run("broadcast", MIB, 1e-4)]
    comparison.save(runs, tmp_path / "peers", "ours and peers")
    ratios = peer_goals.read([tmp_path / "peers.json"])
    (told,) = [line for line in peer_goals.reductions(ratios) if any(line[1:])]
    assert told == ["2 ranks, 1 MiB", "", "8.00 (6) / **4.00** (5) [2.67]", "", ""]
    (told,) = [line for line in peer_goals.others(ratios) if any(line[1:])]
    assert told == ["broadcast 1 MiB", "", "**0.50** [0.33]", "", ""]


def test_of_several_sizes_the_least_counts(tmp_path: Path) -> None:
    runs = [_run("all_reduce", 8, 4e-4), _run("all_reduce", 256, 3e-4)]
    comparison.save(runs, tmp_path / "peers", "ours and peers")
    ratios = peer_goals.read([tmp_path / "peers.json"])
    (told,) = [line for line in peer_goals.reductions(ratios) if any(line[1:])]
    assert told == ["2 ranks, 8 B to 256 B", "", "1.50 (1.2) [1.00]", "", ""]
