"""Read the arguments of `fit`, `evaluate` and `predict`: arrays or batches, and the batch size."""

from __future__ import annotations

from typing import Any

from allreduce.data import check_batch_size
from allreduce.errors import UsageError
from allreduce.training.arrays import (
    as_samples,
    gives_batches,
    split,
    validation_samples,
    with_class_weight,
)
from allreduce.training.options import FitOptions, is_sharded

BATCH_PER_REPLICA = 32  # Keras's default batch, on every replica


def training_data(x: Any, y: Any, options: FitOptions) -> tuple[Any, Any]:
    """Read x, y and validation_data: Samples, or iterables of batches."""
    sharded = is_sharded(options.data)
    if not gives_batches(x, y):
        samples = as_samples(x, y, options.sample_weight, may_be_empty=sharded)
        tests = _validation_data(options, sharded)
        if options.validation_split:
            samples, tests = split(samples, options.validation_split)
        if options.class_weight is not None:
            samples = with_class_weight(samples, options.class_weight)
        return samples, tests
    refuse_beside_batches(y=y, sample_weight=options.sample_weight, batch_size=options.batch_size)
    if options.validation_split:
        raise UsageError(
            "validation_split takes rows of arrays away; with batches of "
            f"{type(x).__name__} pass validation_data"
        )
    return x, _validation_data(options, sharded)


def _validation_data(options: FitOptions, sharded: bool) -> Any:
    value = options.validation_data
    if value is None or gives_batches(value):
        return value
    return validation_samples(value, may_be_empty=sharded)


def refuse_beside_batches(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            remedy = "make them of that size" if name == "batch_size" else "put it in them"
            raise UsageError(f"x iterates batches, so {name} is not taken beside it; {remedy}")


def resolve_batch_size(batch_size: int | None, replicator: Any) -> int:
    """Return the global batch size: 32 per replica unless it is given."""
    if batch_size is None:
        return int(BATCH_PER_REPLICA * replicator.num_replicas_in_sync)
    check_batch_size(batch_size)
    return batch_size
