"""`Callback`, the base class, and the reading of the value that some callbacks monitor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any, ClassVar

import numpy as np

from allreduce.errors import UsageError, did_you_mean
from allreduce.events import logger
from allreduce.keywords import Refusing
from allreduce.optim.checks import checked

Logs = dict[str, Any]


class Callback(Refusing):
    """Methods that `fit`, `evaluate` and `predict` call; override those you need.

    Every rank calls them, in the same order, with the same logs: these are global values. The logs
    of an epoch have the means over all its samples; those of `on_train_batch_end` have the means
    over the samples of the epoch so far, which costs an exchange per batch. What `on_epoch_end`
    adds to its logs enters the History.

    After each method ranks exchange the outcome. If the method raises on one rank, all ranks raise,
    with its traceback. If it sets `self.model.stop_training = True` on one, all stop after the
    batch, or epoch. All use the learning rate that rank 0's optimizer has then. Files should be
    written by one rank: `if self.rank == 0:`.

    Attributes:
        params: "epochs", "steps" (None if unknown), "verbose" and "do_validation".
    """

    # Whether it deals with a NaN loss itself, so that `fit` goes on instead of raising.
    handles_nan: ClassVar[bool] = False
    model: Any = None
    params: Mapping[str, Any] = {}

    def set_model(self, model: Any) -> None:
        """Take the model; called before everything else."""
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Take the call's parameters."""
        self.params = params

    @property
    def rank(self) -> int:
        """This process's rank."""
        return rank_of(self.model)

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start of `fit`."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """End of `fit`."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start of an epoch, from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """End of an epoch, after its validation."""

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Keras's short name of `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Keras's short name of `on_train_batch_end`."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Start of a step of `fit`, from 0 in each epoch."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """End of a step of `fit`."""
        self.on_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Start of `evaluate`, or of a validation in `fit`."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """End of `evaluate`, or of a validation in `fit`."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Start of a batch of `evaluate`, or of a validation."""

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """End of a batch of `evaluate`, or of a validation."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Start of `predict`."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """End of `predict`."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Start of a batch of `predict`."""

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """End of a batch of `predict`; it gets no logs."""


def path_text(owner: str, name: str, value: str | PathLike[str]) -> str:
    """Return a path as text; `owner` and `name` are the callback's class and argument."""
    text = fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(text, str):
        raise UsageError(f"{owner} takes {name}, text or a pathlib.Path, not {value!r:.60}")
    return text


def rank_of(model: Any) -> int:
    """Return the rank of a model's process."""
    communicator = model.replicator.communicator
    return communicator.rank if communicator is not None else 0


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
# By method: the one that calls it unless it is overridden.
ALIASES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}


class Monitor:
    """The value of the logs that a callback watches, and whether it has become better.

    Args:
        owner: The callback's class, for messages.
        name: "val_loss".
        mode: "min", "max", or "auto": "min" for losses, and as the metric's `direction` says.
        min_delta: Smaller changes are none.
    """

    def __init__(self, owner: str, name: str, mode: str, min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise UsageError(f'{owner} takes mode "auto", "min" or "max", not {mode!r}')
        if not isinstance(name, str):
            raise UsageError(f"{owner} takes monitor, the name of a value, not {name!r:.60}")
        self._owner, self.name, self._mode = owner, name, mode
        self._delta = abs(checked(f"min_delta of {owner}", min_delta, low=-math.inf))
        self.best: float | None = None
        self._warned = False

    def read(self, logs: Mapping[str, Any] | None, model: Any) -> float | None:
        """Return the value; None, with a warning on rank 0, if there is none."""
        value = (logs or {}).get(self.name)
        if value is not None and np.ndim(value) == 0:
            if self._mode == "auto":
                self._mode = self._direction(model)
            return float(value)
        if not self._warned and rank_of(model) == 0:
            self._warned = True
            known = sorted(logs or {})
            hint = did_you_mean(self.name, known)
            if self.name.startswith("val_") and not any(each.startswith("val_") for each in known):
                hint = "; it was not validated: pass validation_data, or validation_freq=1"
            logger.warning(
                "%s monitors %r, but the epoch has %s%s",
                *(self._owner, self.name, ", ".join(known) or "no values", hint),
            )
        return None

    def _direction(self, model: Any) -> str:
        name = self.name.removeprefix("val_")
        known: Mapping[str, str | None] = model.metric_directions
        found = known.get(name)
        if found is None and name not in known and (name == "loss" or name.endswith("_loss")):
            found = "min"
        if found is None:
            raise UsageError(
                f"{self._owner} cannot tell whether {self.name!r} should rise or fall: pass "
                'mode="max" or mode="min", or give the metric\'s class a direction = "max"'
            )
        return found

    def improves(self, value: float, than: float | None) -> bool:
        """Return whether a value that was read is better than another by more than `min_delta`.

        A NaN never is.
        """
        if than is None:
            return value == value
        return (value - than if self._mode == "max" else than - value) > self._delta

    def take(self, value: float) -> bool:
        """Keep a value if it is better than the best before; tells whether it is."""
        if not self.improves(value, self.best):
            return False
        self.best = value
        return True
