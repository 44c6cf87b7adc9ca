"""Exact results: sums over samples in float64, combined over ranks once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce.errors import NumericsError
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.training.ranks import gather_integers, rank_of, size_of

_READ_STEPS = 16  # between reads of values still being copied; a divisor of LossWatch.every


class Totals:
    """Sums of the steps' results: per-sample values for each replica, and states of metrics.

    Steps do not wait for values that devices are still copying to the host.

    Args:
        state_values: For each result that is an increment of a metric's state, the function from
            the sum to the value. All other results are values per sample, which are averaged.

    Attributes:
        first_nan: The first step, from 0, with a NaN loss in this process, among those read so far;
            -1 for none.
    """

    def __init__(
        self, replicator: Replicator, state_values: Mapping[str, Callable[[np.ndarray], Any]]
    ) -> None:
        self._replicator = replicator
        self._state_values = state_values
        self._states: dict[str, np.ndarray] = {}
        self._order: list[str] = []
        self._sums: dict[str, list[float]] = {}
        self._counts = [0] * replicator.local_replicas
        self._unread: list[Mapping[str, PerReplica]] = []
        self._read_steps = 0
        self.first_nan = -1

    @property
    def rows(self) -> int:
        """How many samples this process has seen."""
        return sum(self._counts)

    def add(self, results: Mapping[str, PerReplica]) -> None:
        """Add the next step's results."""
        for index, rows in enumerate(next(iter(results.values())).weights):
            self._counts[index] += rows
        self._unread.append(results)
        is_pending = any(result.is_pending for result in results.values())
        if not is_pending or len(self._unread) >= _READ_STEPS:
            self.read()

    def read(self) -> None:
        """Sum all results added so far, waiting for their copies."""
        for results in self._unread:
            self._order = self._order or list(results)
            for name, result in results.items():
                if name in self._state_values:
                    self._add_state(name, result)
                    continue
                sums = self._sums.setdefault(name, [0.0] * len(self._counts))
                for index, value in enumerate(result.values):
                    sums[index] += _sum(value, result.weights[index])
            if self.first_nan < 0 and any(map(math.isnan, self._sums.get("loss", ()))):
                self.first_nan = self._read_steps
            self._read_steps += 1
        self._unread.clear()

    def _add_state(self, name: str, result: PerReplica) -> None:
        for value, rows in zip(result.values, result.weights, strict=True):
            added = np.asarray(value, np.float64)
            state = self._states.setdefault(name, np.zeros(added.shape))
            if rows:  # a replica without samples contributes nothing
                state += added

    def local_means(self) -> dict[str, float]:
        """Return this process's results so far that are numbers, for progress output."""
        self.read()
        means = {name: sum(sums) / max(1, self.rows) for name, sums in self._sums.items()}
        found = self._in_order(means, self._states)
        return {name: value for name, value in found.items() if isinstance(value, float)}

    def report(self) -> tuple[list[list[str]], list[np.ndarray]]:
        """Return this process's sums for adding them to others'; `reported` reads the result.

        Returns:
            Name and kind of each result, "mean" or "state", and the arrays: the number of samples,
            then each result's sum.
        """
        self.read()
        kinds = [[n, "mean" if n in self._sums else "state"] for n in self._order]
        arrays = [np.asarray(float(self.rows))]
        for name, kind in kinds:
            found = np.asarray(sum(self._sums[name])) if kind == "mean" else self._states[name]
            arrays.append(found)
        return kinds, arrays

    def means(self) -> dict[str, Any]:
        """Combine all replicas; nothing before the first step.

        Every rank gets the same results, wherever the replicas are. The exchange
        adds zeros to each replica's sums, which is exact; then every rank sums them in the order of
        the replicas' ids. States are summed over ranks as they are.
        """
        self.read()
        if not self._order:
            return {}
        replicator = self._replicator
        table = np.zeros((replicator.num_replicas_in_sync, len(self._sums) + 1))
        first = replicator.first_replica
        mine = table[first : first + replicator.local_replicas]
        mine[:, 0] = self._counts
        for column, sums in enumerate(self._sums.values(), 1):
            mine[:, column] = sums
        table = replicator.sum_over_ranks(f"the means of {', '.join(self._sums)}", table)
        count = float(table[:, 0].sum())
        means = {
            name: _total(table[:, column]) / count for column, name in enumerate(self._sums, 1)
        }
        states = {
            name: replicator.sum_over_ranks(f"the state of metric {name!r}", state)
            for name, state in self._states.items()
        }
        return self._in_order(means, states)

    def _in_order(
        self, means: Mapping[str, float], states: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """Return all results in the order of the step's."""
        return {
            name: means[name] if name in means else self._state_values[name](states[name])
            for name in self._order
        }


def reported(
    kinds: Sequence[Sequence[str]],
    arrays: Sequence[np.ndarray],
    state_values: Mapping[str, Callable[[np.ndarray], Any]],
) -> dict[str, Any]:
    """Return the results of sums that `Totals.report` gave, added up over processes."""
    count, found = float(arrays[0]), {}
    for (name, kind), total in zip(kinds, arrays[1:], strict=True):
        found[name] = float(total) / count if kind == "mean" else state_values[name](total)
    return found


def _sum(value: np.ndarray, rows: int) -> float:
    if value.ndim:
        return float(np.add.reduce(value, axis=None, dtype=np.float64))
    return float(value) * rows  # a scalar is the mean over the replica's rows


def _total(column: np.ndarray) -> float:
    try:
        return math.fsum(column)
    except (OverflowError, ValueError):  # infinities
        return float(column.sum())


class LossWatch:
    """Raises on a NaN loss, with the same message on all ranks.

    A rank does not raise alone, because the others would wait for it in their next collective; so
    ranks exchange their findings every `every` steps and at the end of the epoch.
    """

    every = 64  # steps; a small collective this rarely has no measurable cost

    def __init__(self, replicator: Replicator, epoch: int, output_warning: str = "") -> None:
        self._replicator = replicator
        self._epoch = epoch
        self._output_warning = output_warning
        self._alone = size_of(replicator) == 1

    def note(self, step: int, totals: Totals) -> None:
        """Check the results read so far, after a step (from 0)."""
        if totals.first_nan >= 0 if self._alone else (step + 1) % self.every == 0:
            self.agree(totals)

    def agree(self, totals: Totals) -> None:
        """Exchange the findings of all steps.

        Raises:
            NumericsError: Some rank's loss has been a NaN; the message names the first step and
                rank.
        """
        totals.read()
        firsts = gather_integers(self._replicator, "the first NaN", [totals.first_nan])[
            :, 0
        ].tolist()
        found = [(step, rank) for rank, step in enumerate(firsts) if step >= 0]
        if not found:
            return
        step, rank = min(found)
        here = rank_of(self._replicator)
        remedy = "lower the learning rate, and look for NaN or infinity in x and y"
        if self._epoch == step == 0:
            remedy = (
                "look for NaN or infinity in x and y, and in the weights: a NaN loss in an earlier "
                "fit makes them NaN, so make the model again, or load it"
            )
        raise NumericsError(
            f"fit on rank {here}: the loss became NaN in epoch {self._epoch + 1}, step {step + 1} "
            f"(first on rank {rank}); {self._output_warning or remedy}"
        )
