"""What people see of a run: bars on a terminal, lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from allreduce.data import split_rows
from allreduce.errors import UsageError

_REFRESH = (
    0.1  # seconds between two changes of a bar: faster than the eye, too slow to cost anything
)


def describe_batch(batch_size: int, replicas: int) -> str:
    """Say how a global batch is shared: `global batch 256 = 8 × 32`."""
    sizes = split_rows(batch_size, replicas)
    parts = [f"{sizes.count(size)} × {size}" for size in dict.fromkeys(sizes)]
    return f"global batch {batch_size} = {' + '.join(parts)}"


def resolve(verbose: Any, rank: int) -> int:
    """Turn `verbose` into 0 (nothing), 1 (bars on a terminal) or 2 (lines).

    Raises:
        UsageError: It is none of "auto", 0, 1, 2.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise UsageError(f'verbose is "auto", 0, 1 or 2, not {verbose!r}')
    if rank or not verbose:
        return 0
    if verbose == 2 or not sys.stdout.isatty():
        return 2
    return 1


def format_values(values: Mapping[str, float]) -> str:
    """Write metrics as people read them."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


class Epoch(AbstractContextManager["Epoch"]):
    """Reports one epoch, or one evaluation.

    Args:
        label: "epoch 1/5".
        steps: How many there are.
        mode: What `resolve` gave.
    """

    def __init__(self, label: str, steps: int, mode: int) -> None:
        self._label = label
        self._mode = mode
        self._start = time.perf_counter()
        self._rate = 0.0
        self._shown = 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if mode == 1:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[values]}"),
                console=Console(file=sys.stdout),
                auto_refresh=False,
            )
            self._bar.start()
            self._task = self._bar.add_task(label, total=steps, values="")

    def step(self, number: int, values: Callable[[], Mapping[str, float]]) -> None:
        """Move the bar to step `number` (from 1); `values` is asked only to be shown."""
        now = time.perf_counter()
        if self._bar is not None and now - self._shown >= _REFRESH:
            self._shown = now
            text = format_values(values())
            self._bar.update(self._task, completed=number, values=text, refresh=True)

    def measured(self, samples: int) -> None:
        """Stop the clock: all ranks together have done `samples`; validation may follow."""
        self._rate = samples / max(time.perf_counter() - self._start, 1e-9)

    def finish(self, steps: int, values: Mapping[str, float]) -> None:
        """Show the epoch's exact values and its speed."""
        text = "  ".join(filter(None, (format_values(values), f"{self._rate:,.0f} samples/s")))
        if self._bar is not None:
            self._bar.update(self._task, completed=steps, values=text, refresh=True)
        elif self._mode == 2:
            print(f"{self._label}  {text}", flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
