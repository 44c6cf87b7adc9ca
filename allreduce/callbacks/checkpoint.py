"""`ModelCheckpoint`: save the model between epochs or steps."""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from os import PathLike
from string import Formatter
from typing import Any

import numpy as np

from allreduce.callbacks.base import Callback, Logs, Monitor, path_text
from allreduce.devices.integers import switch
from allreduce.errors import UsageError

# How similar to a known name a misspelt one is; names that other callbacks add are less.
_NEAR = 0.85


class ModelCheckpoint(Callback):
    """Saves the model or its weights after epochs, or after every so many batches.

    Runs on all ranks, which decide alike; rank 0 writes the file.

    Args:
        filepath: The file; `{epoch}` (from 1), `{batch}` and names of logs may stand in it:
            "model-{epoch:02d}-{val_loss:.2f}.safetensors".
        monitor: The value that `save_best_only` looks at.
        verbose: 1 prints a line for each file.
        save_best_only: Whether to save only if the monitored value is the best so far.
        save_weights_only: Whether `save_weights` is called instead of `save`.
        mode: "min", "max" or "auto": "min" for losses, and as the metric's `direction` says.
        save_freq: "epoch", or a number of batches, counted over epochs.
        initial_value_threshold: A value that has to be bettered.

    Raises:
        UsageError: `save_freq` is neither, or another argument is of another type.
    """

    def __init__(
        self,
        filepath: str | PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        whole = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq > 0
        if save_freq != "epoch" and not whole:
            raise UsageError(
                f'ModelCheckpoint takes save_freq "epoch" or a number of batches: {save_freq!r}'
            )
        self._monitor = Monitor("ModelCheckpoint", monitor, mode)
        self._monitor.best = initial_value_threshold
        self.filepath = path_text("ModelCheckpoint", "filepath", filepath)
        self.verbose = verbose
        self.save_best_only = switch("save_best_only of ModelCheckpoint", save_best_only)
        self.save_weights_only = switch("save_weights_only of ModelCheckpoint", save_weights_only)
        self.save_freq = save_freq
        self._epoch = self._batches = 0
        if whole:  # else every batch would cost an exchange
            self.on_train_batch_end = self._after_batch  # type: ignore[method-assign]

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        folder = os.path.dirname(self.filepath)
        if self.rank == 0 and folder and "{" not in folder and not os.path.isdir(folder):
            raise UsageError(
                f"ModelCheckpoint cannot save to {self.filepath!r}: there is no folder {folder}; "
                "make it first"
            )
        self._check_names()

    def _check_names(self) -> None:
        """Refuse misspelt names in `filepath`; other callbacks may add logs with other names."""
        try:
            names = [name for _, name, _, _ in Formatter().parse(self.filepath) if name is not None]
        except ValueError as error:
            raise UsageError(f"ModelCheckpoint: filepath {self.filepath!r}: {error}") from None
        logs = self.model.metrics_names
        known = ["epoch", *logs, *(f"val_{name}" for name in logs)]
        if self.save_freq != "epoch":
            known.append("batch")
        for name in map(_first_name, names):
            near = difflib.get_close_matches(name, known, 1, _NEAR)
            if name not in known and (near or name == "batch" or not name.isidentifier()):
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UsageError(
                    f"ModelCheckpoint: filepath {self.filepath!r} names {name!r}, but there are "
                    f"{', '.join(known)}{hint}"
                )
        with suppress(KeyError):  # a name that another callback adds
            self._filled({**dict.fromkeys(known, 0.5), "epoch": 1, "batch": 1})

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002
        if self.save_freq == "epoch":
            self._save(None, logs)

    def _after_batch(self, batch: int, logs: Logs | None = None) -> None:
        self._batches += 1
        if self._batches % int(self.save_freq) == 0:
            self._save(batch, logs)

    def _save(self, batch: int | None, logs: Logs | None) -> None:
        if self.save_best_only:
            value = self._monitor.read(logs, self.model)
            if value is None or not self._monitor.take(value):
                return
        path = self._path(batch, logs)
        if not self.save_weights_only:
            self.model.optimizer.consolidate()  # a collective call, of all ranks
        if self.rank == 0:
            save = self.model.save_weights if self.save_weights_only else self.model.save
            save(path)
        if self.verbose:
            self.say(f"epoch {self._epoch + 1}: saved the model to {path}")

    def _path(self, batch: int | None, logs: Logs | None) -> str:
        numbers = {name: value for name, value in (logs or {}).items() if np.ndim(value) == 0}
        values: dict[str, Any] = {**numbers, "epoch": self._epoch + 1}
        if batch is not None:
            values["batch"] = batch + 1
        try:
            return self._filled(values)
        except KeyError as error:
            raise UsageError(
                f"ModelCheckpoint: filepath {self.filepath!r} names {error}, but there are "
                f"{', '.join(values)}"
            ) from None

    def _filled(self, values: dict[str, Any]) -> str:
        try:
            return self.filepath.format(**values)
        except (AttributeError, TypeError, ValueError) as error:  # such as {epoch:.2s}
            raise UsageError(f"ModelCheckpoint: filepath {self.filepath!r}: {error}") from None


def _first_name(field: str) -> str:
    """Return the name of a replacement field such as "logs[0]"."""
    return re.split(r"[.\[]", field)[0]
