"""All axes but the first as one."""

from __future__ import annotations

from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.nn.core.layer import Layer


class Flatten(Layer):
    """Merge the axes of each sample: `(batch, a, b, …)` to `(batch, a * b * …)`."""

    one_tensor = True

    def call(self, inputs: Tensor) -> Tensor:
        return ops.flatten(inputs)
