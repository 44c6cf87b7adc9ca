"""A layer's values as arrays and files."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np

from allreduce.errors import UsageError
from allreduce.nn import checks, saving
from allreduce.nn.layer import Layer
from allreduce.training import naming_rank


class Weights(Layer):
    """A layer whose variables' values can be taken out, put back and saved."""

    def get_weights(self) -> list[np.ndarray]:
        """Copy all variables' values, in the order of `variables`."""
        self._check_built("get_weights")
        return [variable.numpy() for variable in self.variables]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Change all variables, or none; on every rank with equal values.

        Raises:
            UsageError, ShapeError: Their number, a shape or a dtype does not fit; the message names
                the variable.
        """
        self._check_built("set_weights")
        checks.assign_all(self, list(weights))

    def save_weights(self, path: str | PathLike[str]) -> None:
        """Write the variables' values alone into a safetensors file; like `save` otherwise."""
        self._check_built("save_weights")
        with naming_rank(self.replicator, "save_weights"):
            saving.save_weights(path, self)

    def load_weights(self, path: str | PathLike[str]) -> None:
        """Read the variables' values from a file of `save_weights` or `save`, on every rank.

        Raises:
            UsageError: The file is damaged or another model's; the message names the variable.
        """
        self._check_built("load_weights")
        tensors, _ = saving.read(path)
        saving.assign(self, tensors, path)

    def _check_built(self, what: str) -> None:
        if not self.built:
            raise UsageError(
                f"{what}: model {self.name!r} has no variables yet; call model.build((None, "
                "features)), begin it with ar.nn.Input, or fit it first"
            )
