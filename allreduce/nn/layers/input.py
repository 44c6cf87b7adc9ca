"""The shape and dtype of a model's inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from allreduce.devices.integers import integer
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import BATCH, Spec, show
from allreduce.graph.core.tensor import Tensor
from allreduce.nn.core.layer import Layer, check_one_tensor
from allreduce.nn.core.symbols import Symbol


class Input(Layer):
    """The shape of each sample; first in a Sequential it lets the model be built at once.

    Args:
        shape: The shape of one sample, without the batch.
        dtype: The dtype of samples; `ar.config.floatx()` by default, an integer type for indices.
    """

    def __init__(
        self, shape: int | Sequence[int], *, name: str | None = None, dtype: str | None = None
    ) -> None:
        super().__init__(name=name)
        given = shape if isinstance(shape, Iterable) else (shape,)
        what = "a size of Input's shape, which is one sample's, without the batch,"
        self.sizes = sizes = tuple(integer(what, size, 1) for size in given)
        try:
            self.sample_dtype = np.dtype(dtype or self.dtype)
        except TypeError:
            raise UsageError(f"Input takes the dtype of the samples, not {dtype!r}") from None

        self.symbol = Symbol(Spec((BATCH, *sizes), self.sample_dtype), None, self.name)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the samples, with None for the batch, as in Keras."""
        return self.symbol.shape

    def call(self, inputs: Tensor) -> Tensor:
        check_one_tensor(self, inputs)
        if inputs.shape[1:] != self.sizes:
            raise ShapeError(
                f"{users_line()}: the model's Input takes {show((BATCH, *self.sizes))}, but got "
                f"{show(inputs.shape)}"
            )
        return inputs

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.sizes), "dtype": self.sample_dtype.name}
