"""Models: layers that can be trained, evaluated, saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, ClassVar

import numpy as np

from allreduce import training
from allreduce.callbacks.history import History
from allreduce.devices import options
from allreduce.devices.integers import switch
from allreduce.errors import ShapeError, UsageError, reworded
from allreduce.events import logger
from allreduce.graph.core.naming import snake_case, unique_name
from allreduce.graph.core.scope import users_line
from allreduce.keywords import explain
from allreduce.nn.core import checks, keras_names
from allreduce.nn.metrics import Metric
from allreduce.nn.models import freezing, outputs, reports, saving
from allreduce.nn.models.building import Built
from allreduce.nn.models.outputs import Settings, Values
from allreduce.nn.models.steps import Steps
from allreduce.optim import Optimizer
from allreduce.optim.options import micro_batches
from allreduce.training import FitOptions, Samples


class Model(Built):
    """A layer with a training loop.

    Subclass it, make layers in `__init__` and use them in `call(self, x, training=False)`, or use
    Sequential, or `Model(inputs, outputs)` of the calls of layers on Inputs. It belongs to the
    strategy's scope in which it is made.

    Args:
        name: The prefix of its variables' paths; by default the class's name with a number. Initial
            values depend on it.
        dtype: The dtype that inputs are cast to.
        trainable: Whether optimizers change its variables.
    """

    builds_itself: ClassVar[bool] = False  # whether its constructor makes the variables

    def __init__(
        self, *, name: str | None = None, dtype: str | None = None, trainable: bool = True
    ) -> None:
        unique = name or unique_name(snake_case(type(self).__name__))
        super().__init__(name=unique, dtype=dtype, trainable=trainable)
        self.epochs_done = 0  # which the next epoch's order depends on
        self.stop_training = False
        self.history: History | None = None  # of the latest fit
        self._compiled: Steps | None = None
        self._run_eagerly = False
        # The kinds of samples and targets for which a step was sketched, with the tables that look
        # up such samples directly.
        self._prepared: dict[str, checks.Lookups] = {}

    def _stand_alone(self) -> None:
        self.path = self.name

    @explain(keras_names.OF_COMPILE)
    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        *,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        gradient_accumulation: int | None = None,
    ) -> None:
        """Choose how to train; steps are traced again, with the layers' current settings.

        Args:
            optimizer: An Optimizer, or "adam", "sgd" for one with its defaults.
            loss: A name, a Loss, or a function (y_true, y_pred) that gives one value per sample;
                with several outputs one for all, or a dict by output or a list of several. None
                for a model with a `train_step` of its own that needs none.
            metrics: Names ("accuracy"), Metrics, or functions (y_true, y_pred) that give one value
                per sample: a list, or with several outputs a dict or list of these.
            loss_weights: The factor of each output's loss in the sum: a dict or a list.
            weighted_metrics: Metrics that count samples by `fit`'s sample_weight.
            run_eagerly: Whether steps run op by op, with values to print and to look at in a
                debugger, as `ar.config.run_functions_eagerly(True)` has all functions do.
            gradient_accumulation: How many batches of `fit`, which are then micro-batches, make an
                update; by default as the optimizer has it, one. What is left at the end of an
                epoch of `fit` makes an update, too.

        Raises:
            UsageError: A name is unknown; the message lists the existing ones.
        """
        with training.naming_rank(self.replicator, "compile"):
            run_eagerly = switch("run_eagerly", run_eagerly)
            settings = Settings(loss, loss_weights, metrics, weighted_metrics)
            self._compiled = Steps(self, optimizer, settings)
            if gradient_accumulation is not None:
                count = micro_batches(gradient_accumulation)
                self._compiled.optimizer.gradient_accumulation = count
        self._run_eagerly = run_eagerly
        self._prepared.clear()
        self.predict_step = self._new_predict_step()

    @property
    def run_eagerly(self) -> bool:
        """Whether `fit`, `evaluate` and `predict` run op by op; `ar.config` may say so, too."""
        return self._run_eagerly or options.current().functions_run_eagerly

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer given to `compile`."""
        return self._steps().optimizer

    def finish_update(self) -> None:
        """Update with the micro-batches since the latest update, if there are any."""
        self.optimizer.finish_update()

    @property
    def state_values(self) -> Mapping[str, Values]:
        """The functions from the sum of a metric's increments to its value, by name."""
        return self._steps().state_values

    @property
    def metrics(self) -> list[Metric]:
        """The compiled metrics, without the loss; in a `train_step`, return `compute_metrics`."""
        return list(self._steps().metrics.values())

    @property
    def metrics_names(self) -> list[str]:
        """The names of the compiled losses and metrics in histories, in their order."""
        return self._steps().names

    @property
    def metric_directions(self) -> Mapping[str, str | None]:
        """Whether better values of the compiled metrics are larger ("max") or smaller ("min").

        By their names in histories; None where it is not known.
        """
        return self._steps().directions

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled is not None

    @property
    def train_step(self) -> Callable[..., Any]:
        """The function that takes one step in `fit`.

        A subclass may define `train_step(self, data)` in its place, with `data` as (x, y) or
        (x, y, sample_weight). It runs as one replica's program, calls `self.optimizer.minimize`,
        and returns a dict of the loss and the metrics, one value per sample each.
        """
        return self._steps().train_step

    @property
    def test_step(self) -> Callable[..., Any]:
        """The function that computes losses and metrics in `evaluate`; a subclass may define it."""
        return self._steps().test_step

    @property
    def train_function(self) -> Callable[..., Any]:
        """The function that `fit` traces: of x, y and sample_weight."""
        steps = self._steps()
        return steps.own_train_step if self.has_own("train_step") else steps.train_step

    @property
    def test_function(self) -> Callable[..., Any]:
        """The function that `evaluate` traces: of x, y and sample_weight."""
        steps = self._steps()
        return steps.own_test_step if self.has_own("test_step") else steps.test_step

    def has_own(self, method: str) -> bool:
        """Return whether a subclass defines a `train_step` or `test_step` of its own."""
        return getattr(type(self), method) is not getattr(Model, method)

    @explain()
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        """Compute the compiled loss inside a `train_step`, one value per sample.

        Raises:
            UsageError: `y_pred` is missing.
        """
        del x  # Keras's first argument; losses are computed of outputs
        if y_pred is None:
            raise UsageError(
                f"{users_line()}: compute_loss got no y_pred; its first argument is x, as in "
                "Keras: call compute_loss(y=y, y_pred=y_pred)"
            )
        return self._steps().evaluated(y_pred, y, sample_weight)[0]

    @explain()
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Compute the compiled metrics inside a `train_step`: a dict for it to return."""
        del x  # Keras's first argument; metrics are computed of outputs
        return self._steps().measured(y_pred, y, sample_weight)

    def _steps(self) -> Steps:
        if self._compiled is None:
            raise UsageError(
                f"model {self.name!r} is not compiled: call model.compile(optimizer=…, loss=…) "
                "first"
            )
        return self._compiled

    @explain(keras_names.OF_FIT)
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        *,
        data: str = "same",
    ) -> History:
        """Train; every rank calls it.

        Args:
            x: Samples `(rows, …)`: an array, or a tuple or dict of arrays; equal on all ranks, or
                with `data="sharded"` each rank's own. Or an iterable of batches (x, y) or
                (x, y, sample_weight): a generator, a list, a DataLoader.
            y: Their targets `(rows, …)`, likewise; none with an iterable.
            batch_size: The global batch, shared by all replicas; 32 per replica by default.
            epochs: The number of the last epoch, from 1.
            verbose: "auto" or 1 for a bar on a terminal and lines elsewhere; 2 for lines; 0 for
                nothing.
            callbacks: A list of `ar.callbacks.Callback`.
            validation_split: The share of the last rows that are not trained on but evaluated
                after each epoch.
            validation_data: (x, y), (x, y, sample_weight) or an iterable of batches to evaluate.
            shuffle: Whether to draw a new order of arrays for each epoch, the same on all ranks.
            class_weight: A dict from a class's number to the weight of its samples; others have 1.
            sample_weight: One weight per sample `(rows,)`, which multiplies its loss.
            initial_epoch: The number of epochs that are taken to be done.
            steps_per_epoch: How many batches make an epoch; the next epoch goes on from there.
            validation_steps: How many batches make a validation.
            validation_batch_size: That of arrays; `batch_size` by default.
            validation_freq: After how many epochs to validate, or after which ones (from 1).
            data: "same" or "sharded".

        Returns:
            Exact means over all samples of each epoch, equal on all ranks.

        Raises:
            UsageError, ShapeError: Arguments do not fit each other or the model.
            MismatchError: Ranks passed different things, or have different models.
            NumericsError: The loss became NaN; names the epoch and the step.
        """
        with training.raising_on_all_ranks(self.replicator, "fit"):
            changes = self._steps().new_changes()
            if changes and training.rank_of(self.replicator) == 0:
                logger.warning("fit: %s", changes)
            options = FitOptions(
                *(batch_size, epochs, verbose, callbacks, validation_split, validation_data),
                *(shuffle, class_weight, sample_weight, initial_epoch, steps_per_epoch),
                *(validation_steps, validation_batch_size, validation_freq, data),
            )
        history = training.fit(self, x, y, options)
        self.optimizer.consolidate()  # so that one rank alone can save it
        return history

    @explain(keras_names.OF_FIT)
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        *,
        data: str = "same",
    ) -> Any:
        """Compute the loss and the metrics in inference mode; every rank calls it.

        The arguments are `fit`'s; `steps` is the number of batches to take.

        Returns:
            `[loss, *metrics]`, the loss alone if there are no metrics, or a dict with
            `return_dict`.
        """
        with training.raising_on_all_ranks(self.replicator, "evaluate"):
            switch("return_dict", return_dict)
            self._steps()
        options = {"batch_size": batch_size, "verbose": verbose, "steps": steps, "data": data}
        values = training.evaluate(self, x, y, sample_weight, callbacks=callbacks, **options)
        return values if return_dict else _listed(values)

    @explain(keras_names.OF_FIT)
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Compute the outputs in inference mode; every rank gets all rows, in order.

        Of an iterable's batches (x, y) only x is used.
        """
        options = {"batch_size": batch_size, "verbose": verbose, "steps": steps}
        return training.predict(self, x, callbacks=callbacks, **options)

    @explain()
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Take one step on a global batch, equal on all ranks; every rank calls it.

        With `gradient_accumulation=4` four calls make an update; `finish_update` makes one of what
        is left.

        Returns:
            This batch's loss and metrics, as `evaluate` does.
        """
        switch("return_dict", return_dict)
        given = (x, y, sample_weight)
        values = training.on_batch(self, "train_on_batch", given, class_weight)
        return values if return_dict else _listed(values)

    @explain()
    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Compute one batch's loss and metrics, as `train_on_batch` without a step."""
        switch("return_dict", return_dict)
        values = training.on_batch(self, "test_on_batch", (x, y, sample_weight))
        return values if return_dict else _listed(values)

    @explain()
    def predict_on_batch(self, x: Any) -> Any:
        """Compute the outputs of one batch; every rank gets all rows."""
        return training.on_batch(self, "predict_on_batch", (x,))

    def prepare(self, samples: Samples, kind: str = "") -> None:
        """Make the variables if there are none yet, and check that samples and targets fit.

        Args:
            samples: Arrays.
            kind: The prefix of "x" and "y" in errors: "validation ".
        """
        named, key = samples.named(kind), training.describe(samples)
        if key not in self._prepared:
            checks.same_replicator(self)
        # A step that runs eagerly makes the variables itself: a sketch has no values to look at.
        if key not in self._prepared and not self.run_eagerly:
            needs_loss = samples.y is not None and self._steps().measures
            step = self.test_function if needs_loss else self.predict_step
            try:
                given = samples.given if needs_loss else (samples.x,)
                lookups = self._sketch(step, *given)
            except ShapeError as error:
                parts = [f"{name} has shape {array.shape}" for name, array in named.items()]
                shapes = " and ".join(
                    [*parts[:1], *(each.replace("has shape ", "") for each in parts[1:])]
                )
                told = reworded(error, f"{error} ({shapes})")
                raise told.with_traceback(error.__traceback__) from error.__cause__
            self._prepared[key] = lookups
        checks.known_numbers(self._prepared.get(key, ()), named)
        if isinstance(samples.y, np.ndarray) and self._steps().takes_class_numbers:
            checks.class_numbers(self, samples.y, f"{kind}y")

    def facts(self, what: str) -> dict[str, str]:
        """List the facts that must be equal on all ranks, for "fit", "evaluate" or "predict"."""
        return reports.rank_facts(self, self._compiled, what)

    def output_warning(self) -> str:
        """Return a warning if the outputs are no probabilities where the loss takes such."""
        return outputs.probabilities(self, self._steps().loss)

    def summary(self) -> None:
        """Print the layers, their output shapes and numbers of parameters, on rank 0 alone."""
        if training.rank_of(self.replicator) == 0:
            reports.print_summary(self)

    @explain(keras_names.OF_SAVE)
    def save(self, path: str | PathLike[str]) -> None:
        """Write weights, architecture and optimizer state into one safetensors file.

        There is no communication: rank 0 may call it alone, or all ranks at once. The file appears
        whole or not at all.

        Raises:
            UsageError: The model cannot be described, or the system does not take the file, as a
                full disk does not; or, with `ar.config.set_shard_everywhere`,
                steps of one's own have left the optimizer's slots spread over ranks.
        """
        self._check_built("save")
        if self.sample is None and not self.builds_itself:
            raise UsageError(
                f"model {self.name!r} cannot be saved, because it was called with several arrays "
                "at once; save_weights can save it"
            )
        compiled = self._compiled
        described = {
            "model": self.describe(),
            "sample": self.sample,
            "frozen": freezing.frozen(self),
            "epochs_done": self.epochs_done,
            "compiled": compiled.describe() if compiled else None,
        }
        if compiled:
            described["steps"] = self.replicator.steps_of(self.train_function)
        with training.naming_rank(self.replicator, "save"):
            saving.save(path, self, described, compiled.optimizer if compiled else None)


def _listed(values: Mapping[str, Any]) -> Any:
    listed = list(values.values())
    return listed if len(listed) > 1 else listed[0]
