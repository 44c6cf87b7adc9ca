"""The interface of a model that the fit loop uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from allreduce.callbacks.history import History
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.variable import Variable
from allreduce.training.arrays import Samples


class Trainable(Protocol):
    """A model, as the fit loop sees it.

    Attributes:
        epochs_done: How many epochs it has been trained for; what the next one's order depends on.
        stop_training: Whether `fit` is to end; callbacks set it.
        history: The History of the latest `fit`.
    """

    epochs_done: int
    stop_training: bool
    history: History | None

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

    def output_warning(self) -> str:
        """Describe a mismatch of model and loss, and the remedy; None if there is none."""
        ...

    def prepare(self, samples: Samples, kind: str = "") -> None:
        """Make the variables if there are none yet, and check that samples and targets fit.

        Args:
            samples: Arrays.
            kind: The prefix of "x" and "y" in errors: "validation ".
        """
        ...

    @property
    def train_function(self) -> Callable[..., Mapping[str, Any]]:
        """The function of x, y and sample_weight that takes one step.

        It returns "loss" and metrics, per sample or as scalar means, and increments of the states
        of those in `state_values`.
        """
        ...

    def finish_update(self) -> None:
        """Update with the micro-batches that the latest steps have only added up."""
        ...

    @property
    def test_function(self) -> Callable[..., Mapping[str, Any]]:
        """The function that computes the same without a step and in inference mode."""
        ...

    def predict_step(self, x: Any) -> Any:
        """Compute the outputs in inference mode."""
        ...
