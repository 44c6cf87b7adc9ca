"""How benchmarks report: tables on the terminal, figures as JSON, bars as PNG."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure.contest import p99
from rich.console import Console
from rich.table import Table

from reports import picture


@dataclass(frozen=True)
class Row:
    """One contestant in one case."""

    case: str  # a size, or a number of processes
    contestant: str
    runs: int
    median: float  # seconds
    p99: float  # seconds
    speedup: float  # the baseline's median divided by this one's
    of_limit: float | None = None  # the machine's own limit divided by this one's median


def summarize(case: str, times: Mapping[str, Sequence[float]], *, baseline: str) -> list[Row]:
    """Reduce the contestants' times (seconds) in a case to a row each."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [
        Row(
            case,
            name,
            len(seconds),
            medians[name],
            p99(seconds),
            medians[baseline] / medians[name],
        )
        for name, seconds in times.items()
    ]


def write(rows: Sequence[Row], path: Path, title: str) -> None:
    """Print the rows, and write them to `path` with the suffixes .json and, as bars, .png."""
    print_rows(rows, title)
    save(path, title, {"rows": [asdict(row) for row in rows]})
    values = {(row.case, row.contestant): row.median for row in rows}
    picture.bars(values, path.with_suffix(".png"), title)


def save(path: Path, title: str, figures: Mapping[str, Any]) -> None:
    """Write figures, with the machine and the date, to `path` with the suffix .json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"title": title, "machine": machine(), **figures}
    path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


def print_rows(rows: Sequence[Row], title: str) -> None:
    """Print a line per row, with a column for the limit if it is known."""
    columns = ["case", "contestant", "runs", "median", "99 %", "baseline / this"]
    cells = [
        [
            row.case,
            row.contestant,
            str(row.runs),
            duration(row.median),
            duration(row.p99),
            f"{row.speedup:.2f}",
        ]
        for row in rows
    ]
    if any(row.of_limit is not None for row in rows):
        columns.append("of the limit")
        for line, row in zip(cells, rows, strict=True):
            line.append(percent(row.of_limit))
    print_table(columns, cells, title)


def print_table(columns: Sequence[str], cells: Sequence[Sequence[str]], title: str) -> None:
    """Print a table: with lines on a terminal, in plain columns elsewhere."""
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


def duration(seconds: float) -> str:
    """Format a time: `12.3 µs`."""
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def percent(fraction: float | None) -> str:
    """Format a fraction; nothing for None."""
    return "" if fraction is None else f"{fraction * 100:.0f} %"


def machine() -> dict[str, object]:
    """Describe the machine, with the date."""
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
