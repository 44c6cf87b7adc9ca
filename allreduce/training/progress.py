"""Progress output: bars on a terminal, lines elsewhere, nothing on ranks above 0."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from allreduce.data import split_rows
from allreduce.errors import UsageError, did_you_mean
from allreduce.graph.core import pytree
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.per_replica import PerReplica

_REFRESH = (
    0.1  # seconds between two changes of a bar: faster than the eye, too slow to cost anything
)
_BAR, _COUNT, _TIME = 16, 5, 7  # columns: the bar, "3/100" and "0:00:01"
_WORTH_SHOWING = 0.01  # the share of an epoch's time, above which a wait is shown


def describe_batch(batch_size: int, replicas: int) -> str:
    """Describe how a global batch is split: `global batch 256 = 8 × 32`."""
    sizes = split_rows(batch_size, replicas)
    parts = [f"{sizes.count(size)} × {size}" for size in dict.fromkeys(sizes)]
    return f"global batch {batch_size} = {' + '.join(parts)}"


def resolve(verbose: Any, rank: int) -> int:
    """Turn `verbose` into 0 (nothing), 1 (bars on a terminal) or 2 (lines)."""
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
        steps: How many there are; None if it is not known.
        mode: What `resolve` gave.
        replicator: The replicas that run the steps.
    """

    def __init__(self, label: str, steps: int | None, mode: int, replicator: Replicator) -> None:
        self._label, self._steps, self._mode = label, steps, mode
        self._replicator = replicator
        self._start = time.perf_counter()
        self._seconds = 0.0
        self._done = self._samples = 0
        self._input = self._communication = 0.0  # seconds waited
        self._shown = 0.0
        self._bar: Progress | None = None
        self._width = math.inf  # of a line
        self._task = TaskID(0)
        if mode == 1:
            self._bar = _bar()
            self._width = self._bar.console.width
            self._bar.start()
            self._task = self._bar.add_task(label, total=steps, values="")

    def step(
        self,
        batch: tuple[Any, ...],
        function: Callable[..., Any],
        values: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Count a step, and move the bar; `values` is called only if they are shown."""
        if not self._mode:
            return
        self._done += 1
        self._samples += sum(rows_of(batch))
        compiled = self._replicator.latest(function)
        if compiled is not None:
            self._input += compiled.fed.waited if compiled.fed is not None else 0.0
            bound = compiled.executors[0].latest
            if bound is not None and bound.timing is not None:
                self._communication += sum(clock.exposed for clock in bound.timing.clocks.values())
        now = time.perf_counter()
        if self._bar is not None and now - self._shown >= _REFRESH:
            self._shown, self._seconds = now, now - self._start
            text = self._text(values())
            self._bar.update(self._task, completed=self._done, values=text, refresh=True)

    def count(self, samples: int) -> None:
        """Set the number of samples, where other processes have done some of them."""
        self._samples = samples

    def measured(self) -> None:
        """Stop the clock: all steps are done; validation may follow."""
        self._seconds = time.perf_counter() - self._start

    def finish(self, values: Mapping[str, Any]) -> None:
        """Show the epoch's exact values and its speed, without the bar if they need its place."""
        if self._bar is not None and len(format_values(values)) > self._free_columns:
            self._bar.live.transient = True
            self._bar.stop()
            self._bar = None
        text = self._text(values)
        if self._bar is not None:
            done = self._done or self._steps
            self._bar.update(self._task, total=done, completed=done, values=text, refresh=True)
        elif self._mode:
            print(f"{self._label}  {text}", flush=True)

    def _text(self, values: Mapping[str, Any]) -> str:
        """Return the metrics, and as much of the speed as fits on a line of a terminal."""
        text = format_values(values)
        for part in self._speed():
            if len(text) + len(part) + 2 > self._free_columns:
                break
            text = f"{text}  {part}" if text else part
        return text

    def _speed(self) -> Iterator[str]:
        if self._seconds > 0:
            yield f"{self._samples / self._seconds:,.0f} samples/s"
            for name, waited in (("input", self._input), ("communication", self._communication)):
                share = waited / self._seconds
                if share >= _WORTH_SHOWING:
                    yield f"{share:.0%} waiting for {name}"

    @property
    def _free_columns(self) -> float:
        """How many columns the other parts of a line leave for the values."""
        free = self._width - len(self._label)
        if self._bar is None:
            return free - 2
        count = 2 * len(str(self._steps or "?")) + 1
        return free - max(count, _COUNT) - _BAR - _TIME - 4

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def rows_of(batch: Any) -> tuple[int, ...]:
    """Return how many rows each replica of any rank has of a batch."""
    first: PerReplica = next(leaf for leaf in pytree.leaves(batch) if leaf is not None)
    assert first.rows_per_replica is not None, "all batches of this package have them"
    return first.rows_per_replica


def _bar() -> Progress:
    """Make a bar whose values wrap on narrow terminals."""
    fixed, wrapping = Column(no_wrap=True), Column(overflow="fold")
    return Progress(
        TextColumn("{task.description}", table_column=fixed),
        BarColumn(bar_width=_BAR, table_column=Column(min_width=_BAR)),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=_COUNT)),
        TimeRemainingColumn(compact=True, table_column=fixed),
        TextColumn("{task.fields[values]}", table_column=wrapping),
        console=Console(file=sys.stdout),
        auto_refresh=False,
    )
