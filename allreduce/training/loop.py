"""Passes over batches: what is done with each, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.data.sharding import starts
from allreduce.errors import UsageError
from allreduce.graph.core import pytree
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.training.facts import check_equal, raising_on_all_ranks
from allreduce.training.hooks import Hooks
from allreduce.training.progress import Epoch, rows_of
from allreduce.training.ranks import gather_integers, gather_rows
from allreduce.training.sources import Batch, Batches
from allreduce.training.totals import LossWatch, Totals
from allreduce.training.trainable import Trainable


def run(model: Trainable, step: Callable[..., Any], batch: Batch) -> Any:
    """Run a step of a model on a batch."""
    return model.replicator.run(step, batch, eagerly=model.run_eagerly)


def train(
    model: Trainable, source: Batches, epoch: int, shown: Epoch, hooks: Hooks
) -> tuple[dict[str, Any], int]:
    """Take one step per batch.

    Returns:
        The exact means of what the steps gave, and how many there were.

    Raises:
        NumericsError: The loss became NaN on some rank; all ranks raise it.
    """
    replicator = model.replicator
    totals = Totals(replicator, model.state_values)
    watch = None if hooks.handle_nan else LossWatch(replicator, epoch, model.output_warning())
    step = 0
    with source as batches:
        for batch in batches:
            hooks.call("on_train_batch_begin", step)
            totals.add(run(model, model.train_function, batch))
            if watch is not None:
                watch.note(step, totals)
            hooks.call("on_train_batch_end", step, logs=totals.means)
            shown.step(batch, model.train_function, totals.local_means)
            step += 1
            if hooks.stopping:
                break
    if watch is not None:
        watch.agree(totals)
    shown.measured()
    return totals.means(), step


def measure(
    model: Trainable, source: Batches, shown: Epoch | None, hooks: Hooks
) -> tuple[dict[str, Any], int]:
    """Compute loss and metrics without training.

    Returns:
        Their exact means, and how many batches there were.
    """
    replicator = model.replicator
    totals = Totals(replicator, model.state_values)
    hooks.call("on_test_begin")
    step = 0
    with source as batches:
        for batch in batches:
            hooks.call("on_test_batch_begin", step)
            totals.add(run(model, model.test_function, batch))
            hooks.call("on_test_batch_end", step, logs=totals.means)
            if shown:
                shown.step(batch, model.test_function, totals.local_means)
            step += 1
    if shown:
        shown.measured()
    means = totals.means()
    hooks.call("on_test_end", logs=means)
    return means, step


def predict(model: Trainable, source: Batches, shown: Epoch, hooks: Hooks) -> Any:
    """Compute the outputs of all rows, in their order, on every rank."""
    replicator = model.replicator
    structure: Any = None
    parts: list[list[PerReplica]] = []  # for each output, that of each step
    sizes: list[tuple[int, ...]] = []  # of each step, by replica
    hooks.call("on_predict_begin")
    with source as batches:
        for step, batch in enumerate(batches):
            hooks.call("on_predict_batch_begin", step)
            structure = run(model, model.predict_step, batch[:1])
            sizes.append(rows_of(batch))
            found = pytree.leaves(structure)
            parts = parts or [[] for _ in found]
            for kept, result in zip(parts, found, strict=True):
                kept.append(result)
            hooks.call("on_predict_batch_end", step)
            shown.step(batch, model.predict_step, dict)
    shown.measured()
    hooks.call("on_predict_end")
    if not sizes:
        raise UsageError("x gave no batch to predict")
    with raising_on_all_ranks(replicator, "predict"):
        outputs = [_rows_of(kept) for kept in parts]
    check_equal(replicator, "predict", {})
    whole = iter([_in_order(replicator, sizes, each) for each in outputs])
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


def _in_order(
    replicator: Replicator, sizes: Sequence[tuple[int, ...]], mine: np.ndarray
) -> np.ndarray:
    """Put every rank's rows where they stood in the batches.

    Args:
        sizes: How many rows each replica had, in each step.
        mine: The rows that this process's replicas gave, step by step.
    """
    here = [replicator.first_replica, replicator.local_replicas]
    replicas = gather_integers(replicator, "the replicas of each rank", here)
    offsets = starts([rows for step in sizes for rows in step])  # by step and replica
    sources: list[np.ndarray] = []
    for first, count in replicas.tolist():
        taken = [
            np.arange(offsets[at * len(step) + each], offsets[at * len(step) + each] + step[each])
            for at, step in enumerate(sizes)
            for each in range(first, first + count)
        ]
        sources.append(np.concatenate(taken))
    gathered = gather_rows(replicator, mine, [len(places) for places in sources])
    result = np.empty_like(gathered)
    result[np.concatenate(sources)] = gathered
    return result
