"""Compare other libraries with ours: ratios within each run, medians over runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from measure.cases import Case, size_name
from measure.contest import EMPTY, ORDINARY, PRIVATE_PROBE, PROBE, Timing
from measure.revision import Revision

from reports import picture, report

Place = tuple[str, int, int]  # collective, ranks, bytes
_OURS = (EMPTY, ORDINARY, PROBE, PRIVATE_PROBE)
_PANEL_CURVES = 8  # a panel with more is split


@dataclass(frozen=True)
class Run:
    """The timings of one peer and of ours, measured alternately.

    Args:
        peer: The name of the peer's timings.
        about: The version that the peer's library reports.
        timings: The timings of both, from one run or from two consecutive ones.
        revision: The date, and our commit.
    """

    peer: str
    about: str
    timings: Sequence[Timing]
    revision: Revision


@dataclass(frozen=True)
class Comparison:
    """One peer compared with ours in one case, of float32."""

    collective: str
    ranks: int
    nbytes: int
    peer: str
    median: float  # seconds, as all times here
    p99: float
    per_empty: float | None  # the peer's median divided by ours on comm.empty memory
    per_ordinary: float | None  # and on ordinary arrays
    per_private: float | None  # and by that of the probe with private arrays
    empty_of_limit: float | None  # the probe's median divided by ours
    ordinary_of_limit: float | None
    ordinary_of_private: float | None  # the private probe's


@dataclass(frozen=True)
class TypeRate:
    """Elements reduced per second, as a multiple of float32's."""

    collective: str
    ranks: int
    nbytes: int
    contestant: str
    dtype: str
    median: float  # seconds
    p99: float
    rate: float


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Compare every peer with our timings of the same run."""
    found = []
    for run in runs:
        by_place = {(each.place, each.contestant): each for each in _float32(run.timings)}
        for (place, contestant), theirs in by_place.items():
            if contestant != run.peer:
                continue
            medians = {
                name: by_place[place, name].median for name in _OURS if (place, name) in by_place
            }
            empty, ordinary, limit, private = (medians.get(name) for name in _OURS)
            found.append(
                Comparison(
                    *place,
                    peer=run.peer,
                    median=theirs.median,
                    p99=theirs.p99,
                    per_empty=_ratio(theirs.median, empty),
                    per_ordinary=_ratio(theirs.median, ordinary),
                    per_private=_ratio(theirs.median, private),
                    empty_of_limit=_ratio(limit, empty),
                    ordinary_of_limit=_ratio(limit, ordinary),
                    ordinary_of_private=_ratio(private, ordinary),
                )
            )
    return found


def type_rates(timings: Sequence[Timing]) -> list[TypeRate]:
    """Compare types at equal bytes, by elements per second."""
    base = {(each.place, each.contestant): each for each in _float32(timings)}
    rates = []
    for each in timings:
        if each.dtype == "float32":
            continue
        count = Case(each.collective, each.dtype, each.ranks, each.nbytes).count
        beside = base[each.place, each.contestant]
        base_count = Case(each.collective, "float32", each.ranks, each.nbytes).count
        rate = (count / each.median) / (base_count / beside.median)
        rates.append(
            TypeRate(*each.place, each.contestant, each.dtype, each.median, each.p99, rate)
        )
    return rates


def print_comparisons(runs: Sequence[Run]) -> None:
    """Print two tables per collective and number of ranks: ratios, and times."""
    comparisons = compare(runs)
    every = [timing for run in runs for timing in _float32(run.timings)]
    for collective, ranks in dict.fromkeys(timing.place[:2] for timing in every):
        own = [each for each in comparisons if (each.collective, each.ranks) == (collective, ranks)]
        times = [each for each in every if each.place[:2] == (collective, ranks)]
        title = f"{collective}, float32, {ranks} ranks"
        probed = any(each.per_private is not None for each in own)
        bound = " (÷ private probe)" if probed else ""
        _print_ratios(own, f"{title}: peer ÷ {EMPTY} / peer ÷ {ORDINARY}{bound}")
        _print_times(times, f"{title}: median / 99 %")


def print_types(runs: Iterable[Run]) -> None:
    """Print the rates of the other types, relative to float32."""
    rates = [rate for run in runs for rate in type_rates(run.timings)]
    columns = ("case", "type", "contestant", "median", "99 %", "elements/s ÷ float32's")
    cells = [
        (
            f"{rate.collective} {size_name(rate.nbytes)}, {rate.ranks} ranks",
            rate.dtype,
            rate.contestant,
            report.duration(rate.median),
            report.duration(rate.p99),
            f"{rate.rate:.2f}",
        )
        for rate in rates
    ]
    report.print_table(columns, cells, "types at equal bytes")


def kept(path: Path, runs: Iterable[Run]) -> list[Run]:
    """Read the runs that `save` has written, without the cases that `runs` measured again.

    Raises:
        SystemExit: It was measured on another machine.
    """
    file = path.with_suffix(".json")
    if not file.exists():
        return []
    written = json.loads(file.read_text())
    for about in ("processor", "cores"):
        if written["machine"][about] != report.machine()[about]:
            raise SystemExit(f"{file} has another machine's figures; name another --out")
    anew = {(run.peer, each.place) for run in runs for each in run.timings}
    found = []
    for run in written["runs"]:
        timings = [Timing(**each) for each in run["timings"]]
        timings = [each for each in timings if (run["peer"], each.place) not in anew]
        revision = Revision(**run["revision"])
        found += [Run(run["peer"], run["about"], timings, revision)] if timings else []
    return found


def save(runs: Sequence[Run], path: Path, title: str) -> None:
    """Write all figures to `path` with the suffix .json, and a picture with .png."""
    every = [timing for run in runs for timing in run.timings]
    figures = {
        "runs": [asdict(run) for run in runs],
        "comparisons": [asdict(each) for each in compare(runs)],
        "types": [asdict(each) for run in runs for each in type_rates(run.timings)],
    }
    report.save(path, title, figures)
    draw(every, path, title)


def draw(timings: Sequence[Timing], path: Path, title: str) -> None:
    """Draw the medians of all timings, a panel per collective and number of ranks."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    by_curve: dict[tuple[str, str, int], list[float]] = {}
    for each in timings:
        panel = f"{each.collective}, {each.ranks} ranks"
        name = label(each)
        by_curve.setdefault((panel, name, each.nbytes), []).append(each.median)
    for (panel, name, nbytes), medians in by_curve.items():
        point = (nbytes, statistics.median(medians))
        panels.setdefault(panel, {}).setdefault(name, []).append(point)
    split = {name: part for panel in panels.items() for name, part in _split(*panel).items()}
    picture.curves(split, path.with_suffix(".png"), title)


def _split(panel: str, curves: Mapping[str, picture.Curve]) -> dict[str, dict[str, picture.Curve]]:
    """Split a crowded panel: libraries in one, our other types and the probes in another."""
    if len(curves) <= _PANEL_CURVES:
        return {panel: dict(curves)}
    ours = [name for name in curves if name.split(", ")[0] in (EMPTY, ORDINARY, PROBE)]
    peers = [name for name in curves if name in (EMPTY, ORDINARY) or name not in ours]
    parts = {f"{panel}: libraries": peers, f"{panel}: types and probes": ours}
    return {title: {name: curves[name] for name in names} for title, names in parts.items()}


def label(timing: Timing) -> str:
    """Return the contestant's name, with its type unless that is float32."""
    suffix = "" if timing.dtype == "float32" else f", {timing.dtype}"
    return timing.contestant + suffix


def _print_ratios(comparisons: Sequence[Comparison], title: str) -> None:
    peers = list(dict.fromkeys(each.peer for each in comparisons))
    by_cell = {(each.nbytes, each.peer): each for each in comparisons}
    limited = any(each.empty_of_limit is not None for each in comparisons)
    cells = []
    for nbytes in sorted({each.nbytes for each in comparisons}):
        line = [size_name(nbytes)]
        for peer in peers:
            cell = by_cell.get((nbytes, peer))
            line.append(_ratios(cell) if cell else "")
        if limited:
            own = [each for each in comparisons if each.nbytes == nbytes]
            empty = _median(each.empty_of_limit for each in own)
            ordinary = _median(each.ordinary_of_limit for each in own)
            line.append(_pair(empty, ordinary, report.percent))
        cells.append(line)
    columns = ["bytes", *peers, *(["of the limit"] if limited else [])]
    report.print_table(columns, cells, title)


def _print_times(timings: Sequence[Timing], title: str) -> None:
    present = dict.fromkeys(each.contestant for each in timings)
    names = sorted(present, key=lambda name: name not in _OURS)  # ours first
    cells = []
    for nbytes in sorted({each.nbytes for each in timings}):
        line = [size_name(nbytes)]
        for name in names:
            own = [each for each in timings if (each.nbytes, each.contestant) == (nbytes, name)]
            middle, late = _median(each.median for each in own), _median(each.p99 for each in own)
            line.append(_pair(middle, late, report.duration) if own else "")
        cells.append(line)
    report.print_table(["bytes", *names], cells, title)


def _ratios(cell: Comparison) -> str:
    both = _pair(cell.per_empty, cell.per_ordinary, "{:.2f}".format)
    return both if cell.per_private is None else f"{both} ({cell.per_private:.2f})"


def _pair(first: float | None, second: float | None, show: Callable[[float], str]) -> str:
    return " / ".join("-" if value is None else show(value) for value in (first, second))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator is not None else None


def _float32(timings: Iterable[Timing]) -> list[Timing]:
    return [timing for timing in timings if timing.dtype == "float32"]
