"""Progress output: bars on a terminal, lines elsewhere, nothing on ranks above 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from allreduce.data import split_rows
from allreduce.errors import UsageError, did_you_mean

_REFRESH = (
    0.1  # seconds between two changes of a bar: faster than the eye, too slow to cost anything
)


def describe_batch(batch_size: int, replicas: int) -> str:
    """Describe how a global batch is split: `global batch 256 = 8 × 32`."""
    sizes = split_rows(batch_size, replicas)
    parts = [f"{sizes.count(size)} × {size}" for size in dict.fromkeys(sizes)]
    return f"global batch {batch_size} = {' + '.join(parts)}"


def resolve(verbose: Any, rank: int) -> int:
    """Turn `verbose` into 0 (nothing), 1 (bars on a terminal) or 2 (lines).

    Raises:
        UsageError: It is none of "auto", 0, 1, 2.
    """
    if not isinstance(verbose, str | int | np.integer) or verbose not in ("auto", 0, 1, 2):
        raise UsageError(
            f'verbose is "auto", 0, 1 or 2, not {verbose!r}{did_you_mean(verbose, ["auto"])}'
        )
    if rank or not verbose:
        return 0
    if verbose == 2 or not sys.stdout.isatty():
        return 2
    return 1


def format_values(values: Mapping[str, Any]) -> str:
    """Format metrics that are numbers; a confusion matrix has no place in a line."""
    numbers = {name: value for name, value in values.items() if np.ndim(value) == 0}
    return "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())


class Epoch(AbstractContextManager["Epoch"]):
    """Reports one epoch, or one evaluation.

    Args:
        label: "epoch 1/5".
        steps: The number of steps.
        samples: The number of samples of all ranks.
        mode: The result of `resolve`.
    """

    def __init__(self, label: str, steps: int, samples: int, mode: int) -> None:
        self._label = label
        self._steps = steps
        self._samples = samples
        self._mode = mode
        self._start = time.perf_counter()
        self._rate = 0.0
        self._shown = 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if mode == 1:
            self._bar = _bar()
            self._bar.start()
            self._task = self._bar.add_task(label, total=steps, values="")

    def step(self, number: int, values: Callable[[], Mapping[str, float]]) -> None:
        """Move the bar to step `number` (from 1); `values` is called only if they are shown."""
        now = time.perf_counter()
        if self._bar is not None and now - self._shown >= _REFRESH:
            self._shown = now
            self._rate = self._samples * number / self._steps / (now - self._start)
            self._bar.update(
                self._task, completed=number, values=self._text(values()), refresh=True
            )

    def measured(self) -> None:
        """Stop the clock: all steps are done; validation may follow."""
        self._rate = self._samples / max(time.perf_counter() - self._start, 1e-9)

    def finish(self, values: Mapping[str, float]) -> None:
        """Show the epoch's exact values and its speed."""
        text = self._text(values)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._steps, values=text, refresh=True)
        elif self._mode == 2:
            print(f"{self._label}  {text}", flush=True)

    def _text(self, values: Mapping[str, float]) -> str:
        return "  ".join(filter(None, (format_values(values), f"{self._rate:,.0f} samples/s")))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Progress:
    """Make a bar whose values wrap on narrow terminals."""
    fixed, wrapping = Column(no_wrap=True), Column(overflow="fold")
    return Progress(
        TextColumn("{task.description}", table_column=fixed),
        BarColumn(bar_width=16, table_column=Column(min_width=16)),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=5)),
        TextColumn("{task.fields[values]}", table_column=wrapping),
        console=Console(file=sys.stdout),
        auto_refresh=False,
    )
