"""Passes over arrays: distribute the rows to replicas, run the steps, combine the results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.data import ArrayBatches, Plan, Replicated, Sharded, check_batch_size
from allreduce.errors import UsageError
from allreduce.graph.core import pytree
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.training.facts import check_equal, telling
from allreduce.training.progress import Epoch
from allreduce.training.ranks import everyones, gather_rows
from allreduce.training.totals import LossWatch, Totals
from allreduce.training.trainable import Trainable

BATCH_PER_REPLICA = 32  # Keras's default batch, on every replica


def resolve_batch_size(batch_size: int | None, replicator: Replicator) -> int:
    """Give the global batch size: 32 per replica unless it is given.

    Raises:
        UsageError: It is not an integer above 0.
    """
    if batch_size is None:
        return BATCH_PER_REPLICA * replicator.num_replicas_in_sync
    check_batch_size(batch_size)
    return batch_size


@dataclass(frozen=True, slots=True)
class Rows:
    """Arrays of one row per sample, and their distribution.

    Attributes:
        arrays: This rank's arrays.
        plan: The assignment of rows to replicas.
        total: The number of rows of all ranks.
        sharded: Whether each rank has its own rows.
    """

    arrays: tuple[np.ndarray, ...]
    plan: Plan
    total: int
    sharded: bool


def share_out(
    replicator: Replicator, arrays: Sequence[np.ndarray], batch_size: int, sharded: bool, name: str
) -> Rows:
    """Plan one pass; with `sharded` a collective call.

    Raises:
        UsageError: No rank has any rows.
    """
    own = len(arrays[0])
    if not sharded:
        replicated = Replicated(own, batch_size, replicator.num_replicas_in_sync)
        return Rows(tuple(arrays), replicated, own, sharded)
    here = [own, replicator.local_replicas]
    table = everyones(replicator, "how many rows ranks have", here)
    rows, replicas = (tuple(int(each) for each in column) for column in table.T)
    if not sum(rows):
        raise UsageError(f"{name} is empty on every rank")
    return Rows(tuple(arrays), Sharded(rows, batch_size, replicas), sum(rows), sharded)


def _batches(
    rows: Rows, replicator: Replicator, order: np.ndarray | None = None
) -> closing[Generator[tuple[PerReplica, ...], None, None]]:
    """Iterate the batches; the thread that makes them ends with the block, even if that raises."""
    return closing(iter(ArrayBatches(rows.arrays, rows.plan, replicator, order)))


def _run(model: Trainable, step: Callable[..., Any], batch: tuple[PerReplica, ...]) -> Any:
    return model.replicator.run(step, batch, eagerly=model.run_eagerly)


def train(
    model: Trainable, rows: Rows, order: np.ndarray | None, epoch: int, shown: Epoch
) -> dict[str, Any]:
    """Take one step per batch; return the exact means of the results.

    Raises:
        NumericsError: The loss became NaN on some rank; all ranks raise it.
    """
    replicator = model.replicator
    totals = Totals(replicator, model.state_values)
    watch = LossWatch(replicator, epoch, model.doubts())
    with _batches(rows, replicator, order) as batches:
        for step, batch in enumerate(batches):
            totals.add(_run(model, model.train_step, batch))
            watch.note(step, totals)
            shown.step(step + 1, totals.local_means)
    watch.agree(totals)
    model.finish_update()
    shown.measured()
    return totals.means()


def measure(model: Trainable, rows: Rows, shown: Epoch | None) -> dict[str, Any]:
    """Compute loss and metrics without training; returns their exact means."""
    replicator = model.replicator
    totals = Totals(replicator, model.state_values)
    with _batches(rows, replicator) as batches:
        for step, batch in enumerate(batches):
            totals.add(_run(model, model.test_step, batch))
            if shown:
                shown.step(step + 1, totals.local_means)
    if shown:
        shown.measured()
    return totals.means()


def predict(model: Trainable, rows: Rows, shown: Epoch) -> Any:
    """Compute the outputs of all rows, in their order, on every rank."""
    replicator = model.replicator
    structure: Any = None
    parts: list[list[PerReplica]] = []  # for each output, that of each step
    with _batches(rows, replicator) as batches:
        for step, batch in enumerate(batches):
            structure = _run(model, model.predict_step, batch)
            found = pytree.leaves(structure)
            parts = parts or [[] for _ in found]
            for kept, result in zip(parts, found, strict=True):
                kept.append(result)
            shown.step(step + 1, dict)
    shown.measured()
    with telling(replicator, "predict"):
        outputs = [_rows_of(kept) for kept in parts]
    check_equal(replicator, "predict", {})
    whole = iter([_in_order(replicator, rows.plan, each) for each in outputs])
    return pytree.replace_leaves(structure, whole)


def _rows_of(results: Sequence[PerReplica]) -> np.ndarray:
    """Join the rows that this process's replicas gave, step by step."""
    parts = [part for result in results for part in result.values]
    counts = [rows for result in results for rows in result.weights]
    for value, rows in zip(parts, counts, strict=True):
        if not value.ndim or len(value) != rows:
            raise UsageError(
                f"predict needs one output row per sample, but {rows} samples gave shape "
                f"{value.shape}"
            )
    return np.concatenate(parts)


def _in_order(replicator: Replicator, plan: Plan, mine: np.ndarray) -> np.ndarray:
    """Put every rank's rows where the plan took them from."""
    pieces = [plan.pieces(step) for step in range(plan.steps)]
    here = [replicator.first_replica, replicator.local_replicas]
    replicas = everyones(replicator, "who has which replicas", here)
    sources: list[np.ndarray] = []
    for first, count in replicas.tolist():
        taken = [piece for step in pieces for piece in step[first : first + count]]
        spans = [np.arange(piece.source, piece.source + piece.rows) for piece in taken]
        sources.append(np.concatenate(spans))
    gathered = gather_rows(replicator, mine, [len(places) for places in sources])
    result = np.empty((sum(map(len, gathered)), *mine.shape[1:]), mine.dtype)
    for places, part in zip(sources, gathered, strict=True):
        result[places] = part
    return result
