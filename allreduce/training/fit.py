"""`fit`, `evaluate` and `predict`: check arguments, compare ranks, run the passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allreduce.data import shuffled
from allreduce.errors import UsageError, did_you_mean
from allreduce.events import logger
from allreduce.graph.consistency.rank_check import Fact
from allreduce.graph.core.seed import chosen, get_seed
from allreduce.training import loop
from allreduce.training.arrays import as_pair, as_samples, as_validation
from allreduce.training.facts import (
    SAME_ARRAYS,
    SAME_ROWS,
    SAME_SAMPLES,
    array,
    check_equal,
    digest,
    option,
    telling,
)
from allreduce.training.loop import Rows, resolve_batch_size, share_out
from allreduce.training.progress import Epoch, describe_batch, resolve
from allreduce.training.ranks import check_world, rank_of, size_of
from allreduce.training.trainable import Trainable

_SAME_VALIDATION = (
    'pass the same validation_data on every rank, or on none; only with data="sharded" each rank '
    "has rows of its own, in x and y, too"
)
_SAME_MODEL = "make and compile the same model on every rank"
_SAME_VALUES = "call set_weights, load_weights and assign on every rank, with equal values"


def fit(model: Trainable, x: Any, y: Any, options: FitOptions) -> History:
    """Train; `Model.fit` says what the arguments mean."""
    check_world(model.replicator, "fit")
    replicator = model.replicator
    with telling(replicator, "fit"):
        sharded, mode = is_sharded(options.data), resolve(options.verbose, rank_of(replicator))
        batch_size = resolve_batch_size(options.batch_size, replicator)
        own = as_pair(x, y, ("x", "y"), may_be_empty=sharded)
        validation = as_validation(options.validation_data, may_be_empty=sharded)
        settled = {
            "batch_size": batch_size,
            "epochs": int(options.epochs),
            "shuffle": bool(options.shuffle),
            "data": options.data,
        }
    tests = validation or (None, None)
    with_tests = {"validation x": tests[0], "validation y": tests[1]}
    _agree(model, "fit", {"x": own[0], "y": own[1]}, settled, with_tests)
    with telling(replicator, "fit"):
        model.prepare(*own)
        if validation:
            model.prepare(*validation, kind="validation ")
    check_equal(replicator, "fit", {})
    doubts = model.doubts()
    if doubts and not model.epochs_done and rank_of(replicator) == 0:
        logger.warning("fit: %s", doubts)
    rows = share_out(replicator, own, batch_size, sharded, "x")
    tested: Rows | None = None
    if validation:
        tested = share_out(replicator, validation, batch_size, sharded, "validation x")
    if mode:
        print(describe_batch(batch_size, replicator.num_replicas_in_sync), flush=True)
    return _train(model, rows, tested, options, mode)


def _train(
    model: Trainable, rows: Rows, tested: Rows | None, options: FitOptions, mode: int
) -> History:
    history = History()
    rank = rank_of(model.replicator)
    for epoch in range(options.epochs):
        order = _order(model, rows, rank) if options.shuffle else None
        label = f"epoch {epoch + 1}/{options.epochs}"
        with Epoch(label, rows.plan.steps, rows.total, mode) as shown:
            values = loop.train(model, rows, order, epoch, shown)
            values |= _validate(model, tested)
            shown.finish(values)
        model.epochs_done += 1
        history.add(epoch, values)
    return history


def _agree(
    model: Trainable,
    what: str,
    arrays: Mapping[str, np.ndarray],
    options: Mapping[str, Any],
    validation: Mapping[str, np.ndarray | None] | None = None,
) -> None:
    """Check that ranks have equal arrays (or arrays of one kind), options and models.

    Raises:
        MismatchError: They differ; on all ranks.
    """
    replicator = model.replicator
    if size_of(replicator) == 1:
        return
    sharded = options.get("data") == SHARDED
    remedy = SAME_ROWS if sharded else SAME_ARRAYS if "data" in options else SAME_SAMPLES
    with telling(replicator, what):  # a config of one's own may raise
        # Variables that no step has met start as replica 0's, whatever they are here.
        values = [each.storage[0] for each in model.variables if each in replicator.shared]
        facts = {
            **{name: option(value) for name, value in options.items()},
            "run_eagerly": option(model.run_eagerly),
            **{name: array(value, remedy, contents=not sharded) for name, value in arrays.items()},
            **{
                name: array(value, _SAME_VALIDATION, contents=not sharded)
                for name, value in (validation or {}).items()
            },
            **{name: Fact(shown, _SAME_MODEL) for name, shown in model.facts(what).items()},
            "the seed": Fact(str(chosen()), "call ar.set_seed with one number on every rank"),
            "the value of the model's variables": Fact(
                "", _SAME_VALUES, ",".join(map(digest, values))
            ),
            "the number of epochs that the model was trained for": Fact(
                str(model.epochs_done), "train the model, or load it with load_model, on every rank"
            ),
        }
    check_equal(replicator, what, facts)


def _validate(model: Trainable, rows: Rows | None) -> dict[str, float]:
    means = loop.measure(model, rows, None) if rows else {}
    return {f"val_{name}": value for name, value in means.items()}


def _order(model: Trainable, rows: Rows, rank: int) -> np.ndarray:
    """Draw the epoch's order: the same on all ranks, or each rank's own where its rows are."""
    own = [rank] if rows.sharded else []
    return shuffled(len(rows.arrays[0]), [get_seed(), model.epochs_done, *own])


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
    with telling(replicator, "evaluate"):
        sharded, mode = is_sharded(data), resolve(verbose, rank_of(replicator))
        batch_size = resolve_batch_size(batch_size, replicator)
        own = as_pair(x, y, ("x", "y"), may_be_empty=sharded)
    options = {"batch_size": batch_size, "data": data}
    _agree(model, "evaluate", {"x": own[0], "y": own[1]}, options)
    with telling(replicator, "evaluate"):
        model.prepare(*own)
    check_equal(replicator, "evaluate", {})
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
    with telling(replicator, "predict"):
        mode = resolve(verbose, rank_of(replicator))
        batch_size = resolve_batch_size(batch_size, replicator)
        samples = as_samples(x, "x")
    _agree(model, "predict", {"x": samples}, {"batch_size": batch_size})
    with telling(replicator, "predict"):
        model.prepare(samples, None)
    check_equal(replicator, "predict", {})
    rows = share_out(replicator, (samples,), batch_size, False, "x")
    with Epoch("predict", rows.plan.steps, rows.total, mode) as shown:
        outputs = loop.predict(model, rows, shown)
        shown.finish({})
    return outputs


@dataclass
class History:
    """Losses and metrics of every epoch, equal on all ranks.

    Attributes:
        epoch: The epochs' numbers, from 0.
        history: "loss", each metric and their "val_" twins, one float per epoch.
    """

    epoch: list[int] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        """Append one epoch."""
        self.epoch.append(epoch)
        for name, value in values.items():
            self.history.setdefault(name, []).append(value)


SHARDED, SAME = "sharded", "same"


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The options of `Model.fit`, which describes them.

    Raises:
        UsageError: One is of another kind than its default, or out of range.
    """

    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    validation_data: Any = None
    shuffle: bool = True
    data: str = SAME

    def __post_init__(self) -> None:
        epochs = self.epochs
        if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 0:
            raise UsageError(f"epochs is an integer from 0, not {epochs!r}")
        if not isinstance(self.shuffle, bool | np.bool_):
            raise UsageError(f"shuffle is True or False, not {self.shuffle!r}")
        is_sharded(self.data)


def is_sharded(data: str) -> bool:
    """Return whether each rank passes its own rows.

    Raises:
        UsageError: `data` is neither of the two.
    """
    if not isinstance(data, str) or data not in (SAME, SHARDED):
        raise UsageError(
            f'data is "{SAME}" (every rank passes equal arrays) or "{SHARDED}" (its own), not '
            f"{data!r}{did_you_mean(data, (SAME, SHARDED))}"
        )
    return data == SHARDED
