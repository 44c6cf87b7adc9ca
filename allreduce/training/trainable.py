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
    """A model, as the fit loop sees it; `Model` in `allreduce/nn` says what each is."""

    epochs_done: int
    stop_training: bool
    history: History | None

    @property
    def replicator(self) -> Replicator: ...
    @property
    def variables(self) -> list[Variable]: ...
    @property
    def state_values(self) -> Mapping[str, Callable[[np.ndarray], Any]]: ...
    @property
    def run_eagerly(self) -> bool: ...
    @property
    def train_function(self) -> Callable[..., Mapping[str, Any]]: ...
    @property
    def test_function(self) -> Callable[..., Mapping[str, Any]]: ...
    def predict_step(self, x: Any) -> Any: ...
    def finish_update(self) -> None: ...
    def facts(self, what: str) -> Mapping[str, str]: ...
    def output_warning(self) -> str: ...
    def prepare(self, samples: Samples, kind: str = "") -> None: ...
