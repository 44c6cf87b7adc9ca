"""Dropout."""

from __future__ import annotations

from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.nn.core.layer import Layer
from allreduce.optim.checks import checked


class Dropout(Layer):
    """Set a share of the inputs to 0 in training and scale up the rest; do nothing otherwise.

    The mask depends on the seed, the step and the sample's place in the global batch, not on the
    number of replicas.

    Args:
        rate: The share to drop, from 0 to below 1.
    """

    one_tensor = True

    def __init__(
        self,
        rate: float,
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.rate = checked("rate of Dropout", rate, low=0, high=1)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        return ops.dropout(inputs, self.rate) if training else inputs
