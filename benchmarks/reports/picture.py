"""Draw medians as curves over sizes or as bars, and ratios with their goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Curve = Sequence[tuple[int, float]]  # bytes and seconds
_COLUMNS = 2  # of panels
_PANEL_INCHES = (8.0, 5.0)
# Styles of curves, in the order of contestants. No two have the same colour and marker.
_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f"),
    *("#bcbd22", "#17becf", "#000000", "#00441b", "#6a0136", "#0000d0"),
)
_MARKERS = "osD^vPX<>*h"


def curves(panels: Mapping[str, Mapping[str, Curve]], path: Path, title: str) -> None:
    """Draw a log-log panel per kind of call, with a curve per contestant.

    A contestant has the same style in all panels.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    contestants = list(dict.fromkeys(name for curves_of in panels.values() for name in curves_of))
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = _figure(rows, columns)
    for (name, curves_of), place in zip(panels.items(), axes.flat, strict=False):
        for contestant, points in curves_of.items():
            sizes, seconds = zip(*sorted(points), strict=True)
            values = [each * 1e6 for each in seconds]
            index = contestants.index(contestant)
            colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
            place.plot(sizes, values, color=colour, marker=marker, markersize=5, label=contestant)
        place.set(xscale="log", yscale="log", title=name, xlabel="bytes", ylabel="µs (median)")
        marks = sorted({size for points in curves_of.values() for size, _ in points})
        place.xaxis.set_major_locator(FixedLocator(marks))
        place.xaxis.set_minor_locator(NullLocator())
        place.xaxis.set_major_formatter(FuncFormatter(_tick))
        place.tick_params(axis="x", labelrotation=30)
        place.grid(True, alpha=0.3)
        place.legend(fontsize="small")
    for place in list(axes.flat)[len(panels) :]:
        place.set_visible(False)
    figure.suptitle(title)
    _save(figure, path)


def bars(values: Mapping[tuple[str, str], float], path: Path, title: str) -> None:
    """Draw a group of bars per case, one bar per contestant; values are seconds."""
    cases = list(dict.fromkeys(case for case, _ in values))
    names = list(dict.fromkeys(name for _, name in values))
    width = 0.8 / len(names)
    figure, axes = _figure(1, 1)
    place = axes.flat[0]
    for index, name in enumerate(names):
        own = {case: seconds for (case, other), seconds in values.items() if other == name}
        left = [cases.index(case) + (index + 0.5) * width - 0.4 for case in own]
        place.bar(left, [seconds * 1e6 for seconds in own.values()], width, label=name)
    place.set_xticks(range(len(cases)), cases)
    place.set(title=title, ylabel="µs (median)")
    place.grid(True, axis="y", alpha=0.3)
    place.legend()
    _save(figure, path)


@dataclass(frozen=True)
class Bar:
    """A named ratio, with its goal if it has one."""

    name: str
    value: float
    goal: float | None


def ratios(bars: Sequence[Bar], path: Path, title: str, label: str) -> None:
    """Draw a horizontal bar per ratio, with a line at its goal."""
    figure, axes = _figure(1, 1, (9.0, 1.2 + 0.5 * len(bars)))
    place = axes.flat[0]
    for y, bar in enumerate(bars):
        reached = bar.goal is None or bar.value >= bar.goal
        place.barh(y, bar.value, 0.6, color="#2563eb" if reached else "#dc2626")
        place.text(bar.value, y, f" {bar.value:.2f}", va="center", fontsize="small")
        if bar.goal is not None:
            place.plot([bar.goal, bar.goal], [y - 0.42, y + 0.42], color="black", lw=2)
    place.axvline(1, color="grey", lw=0.8)
    place.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize="small")
    place.invert_yaxis()
    place.margins(x=0.12)
    place.set(title=title, xlabel=label)
    _save(figure, path)


def _tick(nbytes: float, _: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}iB"
    return f"{nbytes:g} B"


def _figure(rows: int, columns: int, panel: tuple[float, float] = _PANEL_INCHES) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width, height = panel
    size = (width * columns, height * rows)
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
