"""The interface of a model that the fit loop uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.variable import Variable


class Trainable(Protocol):
    """A model, as the fit loop sees it.

    Attributes:
        epochs_done: The number of epochs trained, on which the next one's order depends.
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
        """The functions from the sum of a metric's increments to its value, by name."""
        ...

    @property
    def run_eagerly(self) -> bool:
        """Whether its steps run op by op instead of being traced."""
        ...

    def facts(self, what: str) -> Mapping[str, str]:
        """List the facts that must be equal on all ranks, for "fit", "evaluate" or "predict"."""
        ...

    def doubts(self) -> str:
        """Describe a mismatch of model and loss, and the remedy; None if there is none."""
        ...

    def prepare(self, x: np.ndarray, y: np.ndarray | None, kind: str = "") -> None:
        """Make the variables if there are none yet, and check that samples and targets fit.

        Args:
            x: Samples.
            y: Targets.
            kind: The prefix of "x" and "y" in errors: "validation ".
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
