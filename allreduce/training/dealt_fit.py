"""`fit` on workers that ask for rows, part by part, as those of parameter servers do.

Each worker runs this loop. It does what the answers say: train or validate a part of the rows,
take over the sums of an epoch that is over, or end. So a worker that comes late, or again, finds
its place by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np

from allreduce.callbacks.history import History
from allreduce.data import shuffled
from allreduce.data.prefetch import Stager
from allreduce.errors import UnsupportedError
from allreduce.graph.core import pytree
from allreduce.graph.core.seed import get_seed
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.parameters.dealing import TRAIN, VALIDATE, Answer
from allreduce.parameters.row_ranges import FitSpec
from allreduce.training.arrays import Samples, gives_batches
from allreduce.training.facts import digest
from allreduce.training.hooks import Hooks, as_callbacks
from allreduce.training.inputs import resolve_batch_size, training_data
from allreduce.training.loop import run
from allreduce.training.options import FitOptions, is_sharded
from allreduce.training.progress import Epoch, resolve
from allreduce.training.sources import Batch
from allreduce.training.totals import LossWatch, Totals, reported
from allreduce.training.trainable import Trainable

Report = tuple[dict[str, Any], Sequence[np.ndarray]]


class Dealer(Protocol):
    """A replicator whose processes ask for rows.

    Attributes:
        is_chief: Whether this process's callbacks decide about the training.
        default_batches: The number of replicas that share a global batch.
    """

    is_chief: bool

    @property
    def default_batches(self) -> int: ...

    def begin_fit(self, spec: FitSpec) -> None:
        """Begin a call of `fit`; blocks until the chief has."""
        ...

    def register(self, step: Callable[..., Any], batch: Sequence[Any]) -> None:
        """Take over the values of the variables of a step; the chief gives them initial ones.

        So a process that gets no rows has them, too, and no process waits for the chief's first
        rows.
        """
        ...

    def ask(self, seen: int, stops: bool, done: Report | None) -> Answer:
        """Report a part, and ask what to do next; blocks until there is something.

        Args:
            seen: The first epoch whose sums this process does not know.
            stops: Whether a callback has asked to stop.
            done: The part that is done, and its sums; None if none is.
        """
        ...

    def end_fit(self) -> None:
        """End a call of `fit`: read the newest parameters and slots."""
        ...

    def was_taken(self) -> bool:
        """Return whether the gradients of the latest part were used; False if it was too late."""
        ...

    def refresh(self, *, slots: bool) -> None:
        """Read the newest parameters, and the optimizer's slots if asked for."""
        ...


def fit(model: Trainable, x: Any, y: Any, options: FitOptions) -> History:
    """Train; `Model.fit` says what the arguments mean."""
    return _Run(model, x, y, options).run()


class _Run:
    """One call of `fit` on one worker."""

    def __init__(self, model: Trainable, x: Any, y: Any, options: FitOptions) -> None:
        replicator = model.replicator
        self._model, self._dealer = model, cast(Dealer, replicator)
        _check(x, y, options)
        self._options = options
        self._mode = resolve(options.verbose, 0 if self._dealer.is_chief else 1)
        callbacks = as_callbacks(options.callbacks)
        count = self._dealer.default_batches
        size = resolve_batch_size(options.batch_size, replicator)
        size = size * count if options.batch_size is None else size
        given, tests = training_data(x, y, options)
        self._samples: dict[str, Samples] = {TRAIN: given}
        model.prepare(given)
        if tests is not None:
            self._samples[VALIDATE] = tests
            model.prepare(tests, "validation ")
        self._spec = _spec(model, options, size, given, tests, bool(callbacks))
        params = {"epochs": int(options.epochs), "steps": self._spec.steps or None}
        params |= {"verbose": options.verbose, "do_validation": tests is not None}
        self._hooks = Hooks(model, callbacks, params)
        self._has_callbacks = bool(callbacks)
        self._stager = Stager(replicator)
        self._orders: dict[int, np.ndarray] = {}
        self._step = 0

    def run(self) -> History:
        model, hooks, spec = self._model, self._hooks, self._spec
        model.stop_training = False
        history = model.history = History()
        self._dealer.begin_fit(spec)
        first = slice(0, min(spec.rows, spec.batch_size))
        self._dealer.register(
            model.train_function, next(self._batches(TRAIN, first, spec.batch_size))
        )
        hooks.call("on_train_begin")
        seen, done, logs = spec.first, None, dict[str, Any]()
        shown, tests = self._begin_epoch(seen), False
        while (answer := self._dealer.ask(seen, hooks.stopping, done)).what != "end":
            done = None
            if answer.what == "epoch":
                if not tests:
                    shown.measured()
                logs = self._learn(answer, shown, tests)
                history.on_epoch_end(seen, logs)
                seen = answer.fields["epoch"] + 1
                shown, tests = self._begin_epoch(seen), False
            elif answer.what == TRAIN:
                done = self._train(answer, seen, shown)
            else:
                if not tests:
                    hooks.call("on_test_begin")
                    shown.measured()
                tests = True
                done = self._validate(answer)
        self._dealer.end_fit()
        hooks.call("on_train_end", logs=logs)
        return history

    def _begin_epoch(self, epoch: int) -> Epoch:
        label = f"epoch {epoch + 1}/{self._options.epochs}"
        self._orders.clear()
        self._step = 0
        if epoch < self._options.epochs and not self._hooks.stopping:
            self._hooks.call("on_epoch_begin", epoch)
        return Epoch(label, None, self._mode, self._model.replicator)

    def _learn(self, answer: Answer, shown: Epoch, tests: bool) -> dict[str, Any]:
        """Take over the sums of an epoch, from all workers."""
        model, arrays = self._model, list(answer.arrays)
        logs: dict[str, Any] = {}
        for phase, prefix in ((TRAIN, ""), (VALIDATE, "val_")):
            kinds = answer.fields.get(phase)
            if kinds is None:
                continue
            own, arrays = arrays[: len(kinds) + 1], arrays[len(kinds) + 1 :]
            found = reported(kinds, own, model.state_values)
            if phase == TRAIN:
                shown.count(int(own[0]))
            logs |= {prefix + name: value for name, value in found.items()}
            if phase == VALIDATE and tests:
                self._hooks.call("on_test_end", logs=found)
        with shown:
            shown.finish(logs)
        model.epochs_done += 1
        self._dealer.refresh(slots=self._has_callbacks)
        self._hooks.call("on_epoch_end", answer.fields["epoch"], logs=logs)
        return logs

    def _train(self, answer: Answer, epoch: int, shown: Epoch) -> Report | None:
        """Train a part; returns its sums, or None if they do not count."""
        model, hooks = self._model, self._hooks
        totals = Totals(model.replicator, model.state_values)
        watch = (
            None if hooks.handle_nan else LossWatch(model.replicator, epoch, model.output_warning())
        )
        size = self._spec.batch_size
        for batch in self._batches(TRAIN, self._rows(answer), size):
            hooks.call("on_train_batch_begin", self._step)
            totals.add(run(model, model.train_function, batch))
            if watch is not None:
                watch.note(self._step, totals)
            hooks.call("on_train_batch_end", self._step, logs=totals.means)
            shown.step(batch, model.train_function, totals.local_means)
            self._step += 1
        model.finish_update()
        if not self._dealer.was_taken():
            return None
        if watch is not None:
            watch.agree(totals)
        return _report(answer, totals)

    def _validate(self, answer: Answer) -> Report:
        model, hooks = self._model, self._hooks
        totals = Totals(model.replicator, model.state_values)
        rows = slice(answer.fields["start"], answer.fields["stop"])
        batches = self._batches(VALIDATE, rows, self._spec.test_batch_size)
        for step, batch in enumerate(batches):
            hooks.call("on_test_batch_begin", step)
            totals.add(run(model, model.test_function, batch))
            hooks.call("on_test_batch_end", step, logs=totals.means)
        return _report(answer, totals)

    def _rows(self, answer: Answer) -> slice | np.ndarray:
        """Return the rows of a part, in the order that all workers draw."""
        turn, low, high = (answer.fields[name] for name in ("turn", "start", "stop"))
        if not self._options.shuffle:
            return slice(low, high)
        if turn not in self._orders:
            limited = [turn] if self._spec.steps else []
            done = 0 if limited else self._model.epochs_done
            key = [get_seed(), done, *limited]
            self._orders[turn] = shuffled(self._spec.rows, key)
        return self._orders[turn][low:high]

    def _batches(self, phase: str, rows: slice | np.ndarray, size: int) -> Iterator[Batch]:
        """Yield the batches of some rows, as arguments of a step."""
        samples = self._samples[phase]
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        for low in range(0, count, size):
            high = min(low + size, count)
            if isinstance(rows, slice):
                chosen: slice | np.ndarray = slice(rows.start + low, rows.start + high)
            else:
                chosen = rows[low:high]
            batch = pytree.map_leaves(self._taker(chosen, high - low), samples.given)
            self._stager.finish()
            yield batch

    def _taker(self, rows: slice | np.ndarray, count: int) -> Callable[[Any], Any]:
        def take(leaf: np.ndarray | None) -> PerReplica | None:
            if leaf is None:
                return None
            values = (self._stager.put(0, leaf[rows], own=not isinstance(rows, slice)),)
            return PerReplica(
                values=values, weights=(count,), offsets=(0,), rows_per_replica=(count,)
            )

        return take


def _report(answer: Answer, totals: Totals) -> Report:
    names, arrays = totals.report()
    done = {"part": answer.fields["part"], "epoch": answer.fields["epoch"], "names": names}
    return done, arrays


def _check(x: Any, y: Any, options: FitOptions) -> None:
    """Refuse data whose rows cannot be dealt out."""
    if gives_batches(x, y) or gives_batches(options.validation_data):
        raise UnsupportedError(
            "fit with ParameterServerStrategy deals out the rows of arrays, and batches of an "
            "iterable cannot be dealt out; pass arrays, or call strategy.run in a loop of your own"
        )
    if is_sharded(options.data):
        raise UnsupportedError(
            'fit(data="sharded") with ParameterServerStrategy: rows that only one worker has '
            "cannot be dealt out; pass the same arrays on all workers, or call strategy.run in a "
            "loop of your own"
        )


def _spec(
    model: Trainable,
    options: FitOptions,
    batch_size: int,
    given: Samples,
    tests: Samples | None,
    may_stop: bool,
) -> FitSpec:
    arrays = given.named() | ({} if tests is None else tests.named("validation "))
    samples = [f"{name} {each.shape} {digest(each)}" for name, each in arrays.items()]
    epochs = range(options.initial_epoch, options.epochs)
    micro_batches = getattr(getattr(model, "optimizer", None), "gradient_accumulation", 1)
    if options.validation_steps is not None and tests is not None:
        raise UnsupportedError(
            "fit(validation_steps=…) with ParameterServerStrategy: all rows are dealt out; pass "
            "fewer rows as validation_data"
        )
    return FitSpec(
        rows=given.rows,
        tests=0 if tests is None else tests.rows,
        batch_size=batch_size,
        test_batch_size=int(options.validation_batch_size or batch_size),
        first=int(options.initial_epoch),
        epochs=int(options.epochs),
        steps=int(options.steps_per_epoch or 0),
        validated=tuple(e for e in epochs if tests is not None and options.validates(e)),
        micro_batches=int(micro_batches),
        may_stop=may_stop,
        shuffle=bool(options.shuffle),
        trained=model.epochs_done,
        samples=", ".join(samples),
    )
