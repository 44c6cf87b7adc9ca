"""What the fit loop needs of a model; it knows nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from allreduce.graph.replicator import Replicator


class Trainable(Protocol):
    """A model, as the fit loop sees it.

    Attributes:
        epochs_done: How many epochs it has been trained for; the order of the next one depends on
        it.
    """

    epochs_done: int

    @property
    def replicator(self) -> Replicator:
        """The replicas that the model lives on."""
        ...

    def prepare(self, x: np.ndarray, y: np.ndarray | None) -> None:
        """Make the variables if there are none yet, and check that samples and targets fit."""
        ...

    def train_step(self, x: Any, y: Any) -> Mapping[str, Any]:
        """Take one step, traced: "loss" and each metric, one value per sample or a scalar mean."""
        ...

    def test_step(self, x: Any, y: Any) -> Mapping[str, Any]:
        """Compute the same without a step and in inference mode, traced."""
        ...

    def predict_step(self, x: Any) -> Any:
        """Compute the outputs in inference mode, traced."""
        ...
