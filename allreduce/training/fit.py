"""`fit`, `evaluate` and `predict`: check what came, agree with the other ranks, run the passes."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce.data import shuffled
from allreduce.errors import UsageError
from allreduce.graph.seed import get_seed
from allreduce.training import loop
from allreduce.training.arrays import as_pair, as_samples, as_validation
from allreduce.training.history import History
from allreduce.training.loop import Rows, is_sharded, resolve_batch_size, share_out
from allreduce.training.progress import Epoch, describe_batch, resolve
from allreduce.training.ranks import check_equal, check_world, rank_of
from allreduce.training.trainable import Trainable


def fit(
    model: Trainable,
    x: Any,
    y: Any,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    validation_data: Any = None,
    shuffle: bool = True,
    data: str = "same",
) -> History:
    """Train; `Model.fit` says what the arguments mean."""
    check_world(model.replicator, "fit")
    replicator, rank = model.replicator, rank_of(model.replicator)
    sharded, mode = is_sharded(data), resolve(verbose, rank)
    batch_size = resolve_batch_size(batch_size, replicator)
    _check_epochs(epochs)
    own = as_pair(x, y, ("x", "y"), may_be_empty=sharded)
    validation = as_validation(validation_data, may_be_empty=sharded)
    options = (batch_size, epochs, bool(shuffle), data)
    compared = {"x": own[0], "y": own[1], "the options of fit (batch_size, epochs, …)": options}
    compared |= dict(zip(("validation x", "validation y"), validation or (None, None), strict=True))
    check_equal(replicator, "fit", compared, contents=not sharded)
    model.prepare(*own)
    rows = share_out(replicator, own, batch_size, sharded, "x")
    tested: Rows | None = None
    if validation:
        model.prepare(*validation)
        tested = share_out(replicator, validation, batch_size, sharded, "validation x")
    if mode:
        print(describe_batch(batch_size, replicator.num_replicas_in_sync), flush=True)
    history = History()
    for epoch in range(epochs):
        order = _order(model, rows, rank) if shuffle else None
        with Epoch(f"epoch {epoch + 1}/{epochs}", rows.plan.steps, rows.total, mode) as shown:
            values = loop.train(model, rows, order, epoch, shown)
            values |= _validate(model, tested)
            shown.finish(values)
        model.epochs_done += 1
        history.add(epoch, values)
    return history


def _validate(model: Trainable, rows: Rows | None) -> dict[str, float]:
    means = loop.measure(model, rows, None) if rows else {}
    return {f"val_{name}": value for name, value in means.items()}


def _order(model: Trainable, rows: Rows, rank: int) -> np.ndarray:
    """Draw the epoch's order: the same on all ranks, or each rank's own where its rows are."""
    own = [rank] if rows.sharded else []
    return shuffled(len(rows.arrays[0]), [get_seed(), model.epochs_done, *own])


def _check_epochs(epochs: int) -> None:
    if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 0:
        raise UsageError(f"epochs is an integer from 0, not {epochs!r}")


def evaluate(
    model: Trainable,
    x: Any,
    y: Any,
    *,
    batch_size: int | None = None,
    verbose: Any = "auto",
    data: str = "same",
) -> dict[str, float]:
    """Compute loss and metrics; `Model.evaluate` says what the arguments mean."""
    check_world(model.replicator, "evaluate")
    replicator = model.replicator
    sharded, mode = is_sharded(data), resolve(verbose, rank_of(replicator))
    batch_size = resolve_batch_size(batch_size, replicator)
    own = as_pair(x, y, ("x", "y"), may_be_empty=sharded)
    compared = {"x": own[0], "y": own[1], "batch_size": batch_size}
    check_equal(replicator, "evaluate", compared, contents=not sharded)
    model.prepare(*own)
    rows = share_out(replicator, own, batch_size, sharded, "x")
    with Epoch("evaluate", rows.plan.steps, rows.total, mode) as shown:
        values = loop.measure(model, rows, shown)
        shown.finish(values)
    return values


def predict(
    model: Trainable, x: Any, *, batch_size: int | None = None, verbose: Any = "auto"
) -> Any:
    """Compute the outputs; `Model.predict` says what the arguments mean."""
    check_world(model.replicator, "predict")
    replicator = model.replicator
    mode = resolve(verbose, rank_of(replicator))
    batch_size = resolve_batch_size(batch_size, replicator)
    samples = as_samples(x, "x")
    check_equal(replicator, "predict", {"x": samples, "batch_size": batch_size})
    model.prepare(samples, None)
    rows = share_out(replicator, (samples,), batch_size, False, "x")
    with Epoch("predict", rows.plan.steps, rows.total, mode) as shown:
        outputs = loop.predict(model, rows, shown)
        shown.finish({})
    return outputs
