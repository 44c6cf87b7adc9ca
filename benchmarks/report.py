"""How benchmarks report: a table on the terminal, the figures as JSON, a picture as PNG."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One contestant in one case."""

    case: str  # what was done: a size, a number of processes
    contestant: str
    runs: int
    median: float  # seconds
    p99: float  # seconds
    speedup: float  # the baseline's median divided by this one's


def summarize(case: str, times: Mapping[str, Sequence[float]], *, baseline: str) -> list[Row]:
    """Reduce the contestants' times (seconds) in a case to a row each."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [
        Row(
            case,
            name,
            len(seconds),
            medians[name],
            sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))],
            medians[baseline] / medians[name],
        )
        for name, seconds in times.items()
    ]


def write(rows: Sequence[Row], path: Path, title: str) -> None:
    """Print the rows, and write them to `path` with the suffixes .json and .png."""
    _print(rows, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"title": title, "machine": _machine(), "rows": [asdict(row) for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    _plot(rows, path.with_suffix(".png"), title)


def _print(rows: Sequence[Row], title: str) -> None:
    columns = ("case", "contestant", "runs", "median", "99 %", "baseline / this")
    cells = [
        (
            row.case,
            row.contestant,
            str(row.runs),
            _seconds(row.median),
            _seconds(row.p99),
            f"{row.speedup:.2f}",
        )
        for row in rows
    ]
    console = Console()
    if console.is_terminal:
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="right")
        for line in cells:
            table.add_row(*line)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    print(title)
    for line in (columns, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _seconds(value: float) -> str:
    return f"{value * 1e6:.1f} µs" if value < 1e-3 else f"{value * 1e3:.2f} ms"


def _machine() -> dict[str, object]:
    """Return what is needed to judge the figures."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw lines over many cases, on a logarithmic scale, or bars for a few."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(row.case for row in rows))
    names = list(dict.fromkeys(row.contestant for row in rows))
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for index, name in enumerate(names):
        own = [row for row in rows if row.contestant == name]
        values = [row.median * 1e6 for row in own]
        places = [float(cases.index(row.case)) for row in own]
        if len(cases) > 3:
            axes.plot(places, values, marker="o", markersize=4, label=name)
            axes.set_yscale("log")
        else:
            width = 0.8 / len(names)
            axes.bar([p + index * width - 0.4 + width / 2 for p in places], values, width)
            axes.containers[-1].set_label(name)
    axes.set_xticks(range(len(cases)), cases, rotation=30 if len(cases) > 6 else 0)
    axes.set(title=title, ylabel="µs (median)")
    axes.grid(True, axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
