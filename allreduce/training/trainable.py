"""What the fit loop needs of a model; it knows nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.variable import Variable


class Trainable(Protocol):
    """A model, as the fit loop sees it.

    Attributes:
        epochs_done: How many epochs it has been trained for; what the next one's order depends on.
    """

    epochs_done: int

    @property
    def replicator(self) -> Replicator:
        """The replicas that the model lives on."""
        ...

    @property
    def variables(self) -> list[Variable]:
        """All of its variables; none before `prepare`, where their layers are built lazily."""
        ...

    @property
    def state_values(self) -> Mapping[str, Callable[[np.ndarray], Any]]:
        """What makes the value of a metric of the sum of its increments; of each with a state."""
        ...

    @property
    def run_eagerly(self) -> bool:
        """Whether its steps run op by op instead of being traced."""
        ...

    def facts(self, what: str) -> Mapping[str, str]:
        """Say what has to be the same on all ranks, by name, for "fit", "evaluate" or "predict"."""
        ...

    def doubts(self) -> str:
        """Say what looks wrong with model and loss, and what to do; nothing if all is well."""
        ...

    def prepare(self, x: np.ndarray, y: np.ndarray | None, kind: str = "") -> None:
        """Make the variables if there are none yet, and check that samples and targets fit.

        Args:
            x: Samples.
            y: Targets.
            kind: What errors put before "x" and "y": "validation ".
        """
        ...

    def train_step(self, x: Any, y: Any, sample_weight: Any = None) -> Mapping[str, Any]:
        """Take one step.

        Returns:
            "loss" and metrics, per sample or as scalar means, and increments of the states of those
            in `state_values`.
        """
        ...

    def finish_update(self) -> None:
        """Update with the micro-batches that the latest steps have only added up."""
        ...

    def test_step(self, x: Any, y: Any, sample_weight: Any = None) -> Mapping[str, Any]:
        """Compute the same without a step and in inference mode."""
        ...

    def predict_step(self, x: Any) -> Any:
        """Compute the outputs in inference mode."""
        ...
