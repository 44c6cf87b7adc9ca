"""`fit`, `evaluate` and `predict`: check arguments, compare ranks, run the passes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from allreduce.callbacks.history import History
from allreduce.data import shuffled
from allreduce.devices.integers import integer
from allreduce.errors import UsageError
from allreduce.events import logger
from allreduce.graph.consistency.rank_check import Fact
from allreduce.graph.core.seed import chosen, get_seed
from allreduce.graph.replicate.replicator import Replicator
from allreduce.training import dealt_fit, loop
from allreduce.training.arrays import (
    Samples,
    as_samples,
    check_class_weight,
    gives_batches,
    has_classes,
    with_class_weight,
)
from allreduce.training.facts import (
    SAME_ARRAYS,
    SAME_ROWS,
    SAME_SAMPLES,
    array,
    check_equal,
    digest,
    option,
    raising_on_all_ranks,
)
from allreduce.training.hooks import Hooks, as_callbacks
from allreduce.training.inputs import (
    refuse_beside_batches,
    resolve_batch_size,
    training_data,
)
from allreduce.training.options import SAME, SHARDED, FitOptions, is_sharded
from allreduce.training.progress import Epoch, describe_batch, resolve
from allreduce.training.ranks import check_world, gather_integers, rank_of, size_of
from allreduce.training.sources import ArraySource, IterableSource, Order, Source
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
    if replicator.deals_rows:
        return dealt_fit.fit(model, x, y, options)
    with raising_on_all_ranks(replicator, "fit"):
        mode = resolve(options.verbose, rank_of(replicator))
        callbacks = as_callbacks(options.callbacks)
        batch_size = resolve_batch_size(options.batch_size, replicator)
        tested_size = options.validation_batch_size
        tested_size = batch_size if tested_size is None else resolve_batch_size(tested_size, None)
        given, tests = training_data(x, y, options)
        settled = {"batch_size": batch_size, **options.settled()}
        settled["the list of callbacks"] = [type(each).__name__ for each in callbacks]
    _agree(model, "fit", given, settled, tests)
    _prepare(model, "fit", (given, ""), (tests, "validation "))
    _warn_of_absent_classes(replicator, given, options)
    output_warning = model.output_warning()
    if output_warning and not model.epochs_done and rank_of(replicator) == 0:
        logger.warning("fit: %s", output_warning)
    source = _source(model, given, batch_size, options.data, "", options.steps_per_epoch, options)
    tested: Source | None = None
    if tests is not None:
        steps = options.validation_steps
        tested = _source(model, tests, tested_size, options.data, "validation ", steps, options)
    if mode and isinstance(source, ArraySource):
        print(describe_batch(batch_size, replicator.num_replicas_in_sync), flush=True)
    params = {"epochs": int(options.epochs), "steps": source.steps, "verbose": options.verbose}
    params["do_validation"] = tested is not None
    history = model.history = History()
    hooks = Hooks(model, callbacks, params)
    try:
        _train(model, source, tested, options, mode, hooks, history)
    finally:
        source.close()
        if tested is not None:
            tested.close()
    return history


def _warn_of_absent_classes(replicator: Replicator, given: Any, options: FitOptions) -> None:
    """Warn on rank 0 of weights of classes that are in no rank's arrays."""
    if not options.class_weight or not isinstance(given, Samples):
        return
    classes = sorted(map(int, options.class_weight))
    found = has_classes(given, classes)
    if is_sharded(options.data):
        found = gather_integers(replicator, "the classes in y", found.tolist()).sum(axis=0)
    absent = [str(each) for each, there in zip(classes, found, strict=True) if not there]
    if absent and rank_of(replicator) == 0:
        logger.warning(
            "fit: class_weight has a weight for class %s, which is not in y; a class without a "
            "weight counts 1",
            ", ".join(absent),
        )


def _train(
    model: Trainable,
    source: Source,
    tested: Source | None,
    options: FitOptions,
    mode: int,
    hooks: Hooks,
    history: History,
) -> None:
    model.stop_training = False
    hooks.call("on_train_begin")
    logs: dict[str, Any] = {}
    shortage = _Shortage(model.replicator)
    for epoch in range(options.initial_epoch, options.epochs):
        hooks.call("on_epoch_begin", epoch)
        order = _order(model, source, options) if options.shuffle else None
        label = f"epoch {epoch + 1}/{options.epochs}"
        with Epoch(label, source.steps, mode, model.replicator) as shown:
            values, steps = loop.train(model, source.epoch(order), epoch, shown, hooks)
            if not (hooks.handle_nan and hooks.stopping):  # else it may add up NaN
                model.finish_update()
            if not steps:
                _check_not_first(model.replicator, epoch, options)
                break
            if not hooks.stopping:
                shortage.warn("x", "steps_per_epoch", options.steps_per_epoch, steps)
            logs = dict(values)
            if tested is not None and options.validates(epoch):
                means, steps = loop.measure(model, tested.epoch(), None, hooks)
                wanted = options.validation_steps
                shortage.warn("validation_data", "validation_steps", wanted, steps)
                logs |= {f"val_{name}": value for name, value in means.items()}
            shown.finish(logs)
        model.epochs_done += 1
        hooks.call("on_epoch_end", epoch, logs=logs)
        history.on_epoch_end(epoch, logs)
        if hooks.stopping:
            break
    hooks.call("on_train_end", logs=logs)


class _Shortage:
    """Warns on rank 0, once per argument, that batches have run out; ranks have equal numbers."""

    def __init__(self, replicator: Replicator) -> None:
        self._reported = {"x", "validation_data"} if rank_of(replicator) else set()

    def warn(self, what: str, name: str, wanted: int | None, found: int) -> None:
        """Compare the number of batches of a pass with the number in an option.

        Args:
            what: "x".
            wanted: Its value; None if any number will do, but 0.
        """
        if found >= (wanted or 1) or what in self._reported:
            return
        self._reported.add(what)
        shown = f"ended after {found} batches" if found else "gave no batch"
        logger.warning(
            "fit: %s %s%s; pass something that can be iterated again and is long enough, or a "
            "generator with enough batches for all epochs",
            *(what, shown, f" of {name}={wanted}" if wanted else ""),
        )


def _check_not_first(replicator: Replicator, epoch: int, options: FitOptions) -> None:
    """Warn on rank 0 that an iterator has no more batches; all ranks come here together."""
    if epoch == options.initial_epoch:
        raise UsageError("fit: x gave no batch; an iterator that was gone through gives no more")
    if rank_of(replicator) == 0:
        logger.warning(
            "fit: x has no more batches for epoch %d of %d; pass something that can be iterated "
            "again, or steps_per_epoch, so that one iterator lasts for all epochs",
            *(epoch + 1, options.epochs),
        )


def _source(
    model: Trainable,
    given: Any,
    batch_size: int,
    data: str,
    kind: str,
    steps: int | None,
    options: FitOptions | None = None,
    needs_y: bool = True,
) -> Source:
    """Make a source of arrays or batches; a collective call."""
    trains = options is not None and not kind  # a validation is of the same rows each time
    if isinstance(given, Samples):
        rows = (batch_size, is_sharded(data), kind, steps)
        return ArraySource(model.replicator, given, *rows, goes_on=trains)

    def prepare(samples: Samples, kind: str) -> None:
        model.prepare(samples if needs_y else Samples(samples.x), kind)

    return IterableSource(
        model.replicator,
        given,
        sharded=is_sharded(data),
        what=f"{kind}batch",
        steps=steps,
        prepare=prepare,
        class_weight=options.class_weight if options and trains else None,
        goes_on=trains,
    )


def _prepare(model: Trainable, what: str, *given: tuple[Any, str]) -> None:
    """Build the model and check arrays against it, on all ranks."""
    with raising_on_all_ranks(model.replicator, what):
        for samples, kind in given:
            if isinstance(samples, Samples):
                model.prepare(samples, kind)
    check_equal(model.replicator, what, {})


def _agree(
    model: Trainable, what: str, given: Any, options: Mapping[str, Any], validation: Any = None
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
    with raising_on_all_ranks(replicator, what):  # a user's get_config may raise
        # Variables that no step has met start as replica 0's, whatever they are here.
        values = [each.numpy() for each in model.variables if each in replicator.shared]
        facts = {
            **{name: option(value) for name, value in options.items()},
            "run_eagerly": option(model.run_eagerly),
            **_facts_of(given, "", remedy, sharded),
            **_facts_of(validation, "validation ", _SAME_VALIDATION, sharded),
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


def _facts_of(given: Any, kind: str, remedy: str, sharded: bool) -> dict[str, Fact]:
    if isinstance(given, Samples):
        named = given.named(kind)
        return {name: array(each, remedy, contents=not sharded) for name, each in named.items()}
    # Iterables are compared batch by batch; a rank may have made its own of another class.
    return {f"{kind}x": Fact("None" if given is None else "batches", remedy)}


def _order(model: Trainable, source: Source, options: FitOptions) -> Order | None:
    """Draw orders of passes: the same on all ranks, or each rank's own where its rows are."""
    if not isinstance(source, ArraySource):
        return None
    own = [rank_of(model.replicator)] if is_sharded(options.data) else []
    limited = options.steps_per_epoch is not None  # else an epoch is one pass

    def order(number: int) -> np.ndarray:
        key = [get_seed(), model.epochs_done, *own, *([number] if limited else [])]
        return shuffled(source.rows, key)

    return order


def evaluate(
    model: Trainable,
    x: Any,
    y: Any,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    data: str = "same",
) -> dict[str, Any]:
    """Compute loss and metrics; `Model.evaluate` says what the arguments mean."""
    source, hooks, mode = _begin(
        model, "evaluate", x, y, sample_weight, batch_size, verbose, steps, callbacks, data
    )
    with closing(source), Epoch("evaluate", source.steps, mode, model.replicator) as shown:
        values, found = loop.measure(model, source.epoch(), shown, hooks)
        shown.finish(values)
    if not values:
        raise UsageError("evaluate: x gave no batch")
    if steps is not None and found < steps and rank_of(model.replicator) == 0:
        logger.warning("evaluate: x ended after %d batches of steps=%d", found, steps)
    return values


def predict(
    model: Trainable,
    x: Any,
    *,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Compute the outputs; `Model.predict` says what the arguments mean."""
    source, hooks, mode = _begin(
        model, "predict", x, None, None, batch_size, verbose, steps, callbacks, SAME
    )
    with closing(source), Epoch("predict", source.steps, mode, model.replicator) as shown:
        outputs = loop.predict(model, source.epoch(), shown, hooks)
        shown.finish({})
    return outputs


def _begin(
    model: Trainable,
    what: str,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    verbose: Any,
    steps: int | None,
    callbacks: Any,
    data: str,
) -> tuple[Source, Hooks, int]:
    """Check the arguments of `evaluate` or `predict`, and compare them among ranks.

    Args:
        what: Which of the two.

    Returns:
        The batches, the callbacks, and what to show.
    """
    replicator = model.replicator
    check_world(replicator, what)
    with raising_on_all_ranks(replicator, what):
        sharded, mode = is_sharded(data), resolve(verbose, rank_of(replicator))
        if steps is not None:
            integer("steps", steps, 1)
        hooked = as_callbacks(callbacks)
        given = x
        if gives_batches(x, y):
            refuse_beside_batches(y=y, sample_weight=sample_weight, batch_size=batch_size)
        else:
            given = as_samples(x, y, sample_weight, may_be_empty=sharded)
        batch_size = resolve_batch_size(batch_size, replicator)
    needs_y = what == "evaluate"
    options = {"batch_size": batch_size, "steps": steps} | ({"data": data} if needs_y else {})
    _agree(model, what, given, options)
    _prepare(model, what, (given, ""))
    source = _source(model, given, batch_size, data, "", steps, needs_y=needs_y)
    return source, Hooks(model, hooked, {"steps": source.steps, "verbose": verbose}), mode


def on_batch(
    model: Trainable, what: str, samples: tuple[Any, ...], class_weight: Any = None
) -> Any:
    """Run one step on a global batch, equal on all ranks; every rank calls it.

    Args:
        what: "train_on_batch", "test_on_batch" or "predict_on_batch".
        samples: (x, y, sample_weight), or (x,).

    Returns:
        The batch's loss and metrics, or outputs.
    """
    replicator = model.replicator
    check_world(replicator, what)
    with raising_on_all_ranks(replicator, what):
        given = as_samples(*samples)
        check_class_weight(class_weight)
        if class_weight is not None:
            given = with_class_weight(given, class_weight)
    _agree(model, what, given, {"data": "same"})
    _prepare(model, what, (given, ""))
    source = ArraySource(replicator, given, given.rows)
    hooks, shown = Hooks(model, (), {}), Epoch(what, 1, 0, replicator)
    if what == "predict_on_batch":
        return loop.predict(model, source.epoch(), shown, hooks)
    if what == "test_on_batch":
        return loop.measure(model, source.epoch(), None, hooks)[0]
    return loop.train(model, source.epoch(), model.epochs_done, shown, hooks)[0]
