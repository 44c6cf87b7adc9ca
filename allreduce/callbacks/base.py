"""`Callback`, the base class, and the reading of the value that some callbacks monitor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from allreduce.errors import UsageError, did_you_mean
from allreduce.events import logger

Logs = dict[str, Any]


class Callback:
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
        model: The model.
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
        communicator = self.model.replicator.communicator
        return communicator.rank if communicator is not None else 0

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

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Start of a step of `fit`, from 0 in each epoch."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """End of a step of `fit`."""

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


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))

_RISING = ("acc", "accuracy", "auc", "precision", "recall", "f1_score", "r2_score", "similarity")


class Monitor:
    """The value of the logs that a callback watches, and whether it has become better.

    Args:
        owner: The callback's class, for messages.
        name: "val_loss".
        mode: "min", "max", or "auto": "max" for accuracies, precision and the like.
        min_delta: Smaller changes are none.

    Raises:
        UsageError: The mode is unknown.
    """

    def __init__(self, owner: str, name: str, mode: str, min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise UsageError(f'{owner} takes mode "auto", "min" or "max", not {mode!r}')
        rising = mode == "max" or (mode == "auto" and name.endswith(_RISING))
        self._owner, self.name, self._sign = owner, name, 1.0 if rising else -1.0
        self._delta = abs(min_delta)
        self.best: float | None = None
        self._warned = False

    def read(self, logs: Mapping[str, Any] | None) -> float | None:
        """Return the value; None, with a warning, if there is none."""
        value = (logs or {}).get(self.name)
        if value is not None and np.ndim(value) == 0:
            return float(value)
        if not self._warned:
            self._warned = True
            known = sorted(logs or {})
            logger.warning(
                "%s monitors %r, but the epoch has %s%s",
                *(self._owner, self.name, ", ".join(known) or "no values"),
                did_you_mean(self.name, known),
            )
        return None

    def improves(self, value: float, than: float | None) -> bool:
        """Tell whether a value is better than another by more than `min_delta`; a NaN never is."""
        if than is None:
            return value == value
        return self._sign * (value - than) > self._delta

    def take(self, value: float) -> bool:
        """Keep a value if it is better than the best before; tells whether it is."""
        if not self.improves(value, self.best):
            return False
        self.best = value
        return True
