"""What `fit` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class History:
    """Losses and metrics of every epoch, equal on all ranks.

    Attributes:
        epoch: The epochs' numbers, from 0.
        history: "loss", each metric and their "val_" twins, one float per epoch.
    """

    epoch: list[int] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        """Append one epoch."""
        self.epoch.append(epoch)
        for name, value in values.items():
            self.history.setdefault(name, []).append(value)
