"""Callbacks that set the learning rate between epochs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from allreduce.callbacks.base import Callback, Logs, Monitor
from allreduce.devices.integers import integer
from allreduce.errors import UsageError
from allreduce.optim.checks import checked


class LearningRateScheduler(Callback):
    """Sets the learning rate at the start of each epoch; logs it as "learning_rate".

    Runs on all ranks; all use rank 0's rate. A schedule of `ar.optim.schedules` sets it for each
    update, and needs no callback.

    Args:
        schedule: Takes the epoch's number and the learning rate, or the number alone.
        verbose: 1 prints each rate.
    """

    def __init__(self, schedule: Callable[..., Any], verbose: int = 0) -> None:
        if not callable(schedule):
            raise UsageError(f"LearningRateScheduler takes a function, not {schedule!r}")
        self.schedule, self.verbose = schedule, verbose
        self._takes_rate = _takes_two(schedule)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002
        given = (epoch, self.model.optimizer.learning_rate) if self._takes_rate else (epoch,)
        rate = self.schedule(*given)
        name = f"the learning rate that LearningRateScheduler's function gave for epoch {epoch + 1}"
        self.model.optimizer.learning_rate = checked(name, rate, low=0.0)
        if self.verbose:
            self.say(f"epoch {epoch + 1}: the learning rate is {float(rate):g}")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(0, 0.1)
    except (TypeError, ValueError):
        return False
    return True


class ReduceLROnPlateau(Callback):
    """Lowers the learning rate when the monitored value no longer becomes better.

    Runs on all ranks, which see equal values; all use rank 0's rate. It is logged as
    "learning_rate". The optimizer's rate has to be a number, because a schedule sets its own.

    Args:
        monitor: The value: "val_loss".
        factor: What multiplies the rate, below 1.
        patience: How many epochs without improvement are allowed.
        verbose: 1 prints a line for each change.
        mode: "min", "max" or "auto": "min" for losses, and as the metric's `direction` says.
        min_delta: Smaller changes are no improvement.
        cooldown: How many epochs after a change nothing is counted.
        min_lr: The rate is never lower.

    Raises:
        UsageError: An argument is out of range.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        self._monitor = Monitor("ReduceLROnPlateau", monitor, mode, min_delta)
        self.factor = checked("factor of ReduceLROnPlateau", factor, low=0.0, high=1.0, above=True)
        self.patience = integer("patience of ReduceLROnPlateau", patience, 0)
        self.cooldown = integer("cooldown of ReduceLROnPlateau", cooldown, 0)
        self.min_lr = checked("min_lr of ReduceLROnPlateau", min_lr, low=0.0)
        self.verbose = verbose
        self.wait = self.cooldown_counter = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        if self.model.optimizer.constant_rate is None:
            raise UsageError(
                "ReduceLROnPlateau: the optimizer's learning rate is a schedule; give it a number"
            )
        self._monitor.best = None
        self.wait = self.cooldown_counter = 0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        rate = self.model.optimizer.learning_rate
        if logs is not None:
            logs["learning_rate"] = float(rate)
        value = self._monitor.read(logs, self.model)
        if value is None:
            return
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._monitor.take(value):
            self.wait = 0
        elif not self.cooldown_counter:
            self.wait += 1
            if self.wait >= self.patience and rate > self.min_lr:
                self._reduce(epoch, rate)

    def _reduce(self, epoch: int, rate: float) -> None:
        self.model.optimizer.learning_rate = max(rate * self.factor, self.min_lr)
        self.cooldown_counter, self.wait = self.cooldown, 0
        if self.verbose:
            lowered = self.model.optimizer.learning_rate
            self.say(f"epoch {epoch + 1}: the learning rate falls to {lowered:g}")
