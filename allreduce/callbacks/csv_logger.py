"""`CSVLogger`: one line per epoch in a file."""

from __future__ import annotations

import csv
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from allreduce.callbacks.base import Callback, Logs, path_text
from allreduce.devices.integers import switch
from allreduce.errors import UsageError
from allreduce.files import refusal


class CSVLogger(Callback):
    """Writes each epoch's logs into a CSV file, on rank 0.

    Args:
        filename: The file.
        separator: What stands between values.
        append: Whether to go on with a file that exists.
    """

    def __init__(
        self, filename: str | PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        self._path = Path(path_text("CSVLogger", "filename", filename))
        if not isinstance(separator, str) or len(separator) != 1:
            raise UsageError(f"separator of CSVLogger is one character, not {separator!r}")
        self._separator, self._append = separator, switch("append of CSVLogger", append)
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        if self.rank:
            return
        try:
            old = self._path.read_text() if self._append and self._path.exists() else ""
            self._file = self._path.open("a" if self._append else "w", newline="")
        except OSError as error:
            raise UsageError(f"CSVLogger cannot write {self._path}: {refusal(error)}") from None
        self._columns = old.splitlines()[0].split(self._separator) if old else []

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._file is None:
            return
        values: dict[str, Any] = {"epoch": epoch, **(logs or {})}
        writer = csv.writer(self._file, delimiter=self._separator, lineterminator="\n")
        if not self._columns:
            self._columns = list(values)
            if self.params.get("do_validation") and f"val_{self._columns[1]}" not in values:
                # The first validation comes later (validation_freq): reserve its columns.
                measured = (name for name in self._columns[1:] if name != "learning_rate")
                self._columns += [f"val_{name}" for name in measured]
            writer.writerow(self._columns)
        # An epoch without validation (validation_freq) has fewer values.
        writer.writerow([_shown(values.get(name, "NA")) for name in self._columns])
        self._file.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        if self._file is not None:
            self._file.close()
            self._file = None


def _shown(value: Any) -> Any:
    return np.asarray(value).tolist() if np.ndim(value) else value
