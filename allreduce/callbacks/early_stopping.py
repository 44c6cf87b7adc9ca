"""`EarlyStopping`: end `fit` when a value no longer becomes better."""

from __future__ import annotations

import math

import numpy as np

from allreduce.callbacks.base import Callback, Logs, Monitor
from allreduce.devices.integers import integer, switch
from allreduce.events import logger
from allreduce.optim.checks import checked


class EarlyStopping(Callback):
    """Stops when the monitored value has not become better for `patience` epochs.

    Runs on all ranks, which see equal values, so that all stop after the same epoch.

    Args:
        monitor: The value: "val_loss", "accuracy".
        min_delta: Smaller changes are no improvement.
        patience: How many epochs without improvement are allowed.
        verbose: 1 prints a line when it stops, or restores weights.
        mode: "min", "max" or "auto": "min" for losses, and as the metric's `direction` says.
        baseline: A value that has to be bettered.
        restore_best_weights: Whether the model gets the best epoch's weights back at the end. Each
            rank keeps a copy in memory. The optimizer's slots stay those of the last epoch.
        start_from_epoch: Earlier epochs are not looked at.

    Raises:
        UsageError: An argument is out of range.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        self._monitor = Monitor("EarlyStopping", monitor, mode, min_delta)
        self.monitor, self.verbose = monitor, verbose
        self.patience = integer("patience of EarlyStopping", patience, 0)
        self.start_from_epoch = integer("start_from_epoch of EarlyStopping", start_from_epoch, 0)
        if baseline is not None:
            baseline = checked("baseline of EarlyStopping", baseline, low=-math.inf)
        self.baseline = baseline
        self.restore_best_weights = switch(
            "restore_best_weights of EarlyStopping", restore_best_weights
        )
        self.on_train_begin()

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        self._monitor.best = None
        self.wait = self.stopped_epoch = self.best_epoch = 0
        self.best_weights: list[np.ndarray] | None = None

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._monitor.best

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        value = self._monitor.read(logs, self.model)
        if value is None or epoch < self.start_from_epoch:
            return
        if self.restore_best_weights and self.best_weights is None:
            self._keep(epoch)  # in case that no epoch is better than its predecessor
        self.wait += 1
        if self._monitor.take(value):
            if self.restore_best_weights:
                self._keep(epoch)
            self.best_epoch = epoch
            if self.baseline is None or self._monitor.improves(value, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def _keep(self, epoch: int) -> None:
        self.best_weights, self.best_epoch = self.model.get_weights(), epoch

    def on_train_end(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        if self.stopped_epoch and self.verbose:
            self.say(f"epoch {self.stopped_epoch + 1}: early stopping")
        if self.best_weights is None:
            return
        if self.verbose:
            self.say(f"restoring the weights of epoch {self.best_epoch + 1}, the best")
        if not np.isfinite(self.best if self.best is not None else np.nan):
            logger.warning("EarlyStopping: %s was never a finite number", self.monitor)
        self.model.set_weights(self.best_weights)

    def __repr__(self) -> str:
        return f"EarlyStopping({self.monitor!r}, patience={self.patience})"
