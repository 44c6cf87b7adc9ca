"""`History`: losses and metrics of every epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from allreduce.callbacks.base import Callback, Logs
from allreduce.errors import UnsupportedError, unknown_name


class History(Callback):
    """Losses and metrics of every epoch, equal on all ranks; `fit` makes and returns one.

    Attributes:
        epoch: The epochs' numbers, from 0.
        history: "loss", each metric and their "val_" twins, one float per epoch.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}
        # Not every epoch has each, as with validation_freq.
        self._epochs: dict[str, list[int]] = {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)
            self._epochs.setdefault(name, []).append(epoch)

    def plot(self, names: Iterable[str] | None = None) -> Any:
        """Draw one panel per value, its "val_" twin in the same; returns matplotlib's figure.

        Args:
            names: "loss", "accuracy"; all by default.

        Raises:
            UsageError: There is no such value.
            UnsupportedError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise UnsupportedError(
                "History.plot needs matplotlib: pip install matplotlib"
            ) from None
        known = dict.fromkeys(name.removeprefix("val_") for name in self.history)
        chosen = list(known if names is None else [names] if isinstance(names, str) else names)
        for name in chosen:
            if name not in known and name not in self.history:
                raise unknown_name("value", name, known, "History.plot")
        figure = Figure(figsize=(5 * max(1, len(chosen)), 4), layout="constrained")
        for panel, name in zip(
            figure.subplots(1, max(1, len(chosen)), squeeze=False)[0], chosen, strict=False
        ):
            for key in (name, f"val_{name}"):
                epochs, values = self._epochs.get(key, []), self.history.get(key, [])
                panel.plot(epochs, values, marker=".", label=key)
            panel.set(xlabel="epoch", title=name)
            panel.legend()
        return figure
