"""Training's results: tables on the terminal, figures as JSON, ratios as PNG."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import asdict
from pathlib import Path

import picture
import report
from goals import Figure, Standing

_YES_OR_NO = {True: "yes", False: "NO", None: ""}


def show(standings: Sequence[Standing], figures: Sequence[Figure]) -> None:
    """Print both tables."""
    columns = ["contestant", "processes", "steps", "median", "99 %", "samples/s"]
    for case in dict.fromkeys(each.case for each in standings):
        own = [each for each in standings if each.case == case]
        cells = [
            [
                each.contestant,
                str(each.ranks),
                str(each.steps),
                report.duration(each.median),
                report.duration(each.p99),
                f"{each.rate:,.0f}",
                _number(each.ratio),
                _number(each.goal),
                _YES_OR_NO[each.met],
            ]
            for each in own
        ]
        report.print_table([*columns, "÷ ours", "goal", "met"], cells, case)
    told = [
        [
            each.case,
            each.what,
            _number(each.value),
            "" if each.goal is None else f"{'≤' if each.most else '≥'} {_number(each.goal)}",
            _YES_OR_NO[each.met],
        ]
        for each in figures
    ]
    if told:
        report.print_table(["case", "figure", "value", "goal", "met"], told, "Other figures")


def of_others(path: Path, cases: Container[str]) -> tuple[list[Standing], list[Figure]]:
    """Read what `save` has written, if it has, of cases with other titles than these."""
    file = path.with_suffix(".json")
    written = json.loads(file.read_text()) if file.exists() else {"standings": [], "figures": []}
    for each in (*written["standings"], *written["figures"]):
        del each["met"]
    standings = [Standing(**each) for each in written["standings"] if each["case"] not in cases]
    return standings, [Figure(**each) for each in written["figures"] if each["case"] not in cases]


def save(standings: Sequence[Standing], figures: Sequence[Figure], path: Path, title: str) -> None:
    """Write all of it to `path` with the suffix .json, and a picture with .png."""
    written = {
        "standings": [asdict(each) | {"met": each.met} for each in standings],
        "figures": [asdict(each) | {"met": each.met} for each in figures],
    }
    report.save(path, title, written)
    bars = [
        picture.Bar(
            f"{each.case}\n{each.contestant}, {_processes(each.ranks)}", each.ratio, each.goal
        )
        for each in standings
        if each.ratio is not None
    ]
    if bars:
        label = "median step ÷ ours (a line: what ours is to reach)"
        picture.ratios(bars, path.with_suffix(".png"), title, label)


def _processes(ranks: int) -> str:
    return f"{ranks} process{'es' * (ranks > 1)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
