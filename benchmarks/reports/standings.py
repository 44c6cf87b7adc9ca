"""Training's results: tables on the terminal, figures as JSON, ratios as PNG."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from measure.revision import Revision
from workloads import WORKLOADS

from reports import picture, report
from reports.goals import Figure, Standing

Row = TypeVar("Row", Standing, Figure)
Rows = tuple[list[Standing], list[Figure]]
_YES_OR_NO = {True: "yes", False: "NO", None: ""}


def show(standings: Sequence[Standing], figures: Sequence[Figure]) -> None:
    """Print both tables."""
    columns = ["contestant", "replicas", "steps", "median", "99 %", "samples/s"]
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


def read(path: Path) -> Rows:
    """Read the rows that `save` has written; none if there is no file."""
    file = path.with_suffix(".json")
    written = json.loads(file.read_text()) if file.exists() else {"standings": [], "figures": []}
    for each in (*written["standings"], *written["figures"]):
        del each["met"]
        each["revision"] = Revision(**each["revision"])
    standings = [Standing(**each) for each in written["standings"]]
    return standings, [Figure(**each) for each in written["figures"]]


def missing(known: Iterable[Standing], sides: Mapping[str, Container[str]]) -> list[str]:
    """List the contestants whose rows would be dropped without new ones.

    Both sides of a ratio are measured in one run, so all rows of a case are replaced together.

    Args:
        known: The existing rows.
        sides: The contestants that will be measured, by case.
    """
    lost = {
        f"{each.contestant} in {each.case}": None
        for each in known
        if each.case in sides and each.contestant not in sides[each.case]
    }
    return list(lost)


def merged(known: Rows, made: Rows) -> Rows:
    """Replace the rows of the cases that were measured again."""
    cases = {each.case for each in made[0]}
    return _replaced(known[0], made[0], cases), _replaced(known[1], made[1], cases)


def _replaced(known: list[Row], made: list[Row], cases: Container[str]) -> list[Row]:
    titles = [each.title for each in WORKLOADS.values()]
    rows = [each for each in known if each.case not in cases] + made
    rows.sort(key=lambda each: titles.index(each.case))
    return rows


def save(standings: Sequence[Standing], figures: Sequence[Figure], path: Path, title: str) -> None:
    """Write all rows to `path` with the suffix .json, and a picture with .png."""
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
