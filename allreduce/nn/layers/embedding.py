"""Vectors for numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from allreduce.devices.integers import integer
from allreduce.errors import UsageError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.ops.array.remote_rows import RemoteTable, lookup_rows
from allreduce.graph.trace.variable import Variable
from allreduce.nn import initializers
from allreduce.nn.core.layer import Layer


class Embedding(Layer):
    """Give each number its vector: integers `(batch, …)` to `(batch, …, output_dim)`.

    A number outside of 0…input_dim-1 is an error when the step runs. In the scope of a
    ParameterServerStrategy, servers hold the vectors: a step reads the rows that it uses and sends
    gradients of these only.

    Args:
        input_dim: How many numbers there are.
        output_dim: The size of a vector.
        embeddings_initializer: The initial vectors, `(input_dim, output_dim)`.
        dtype: The dtype of the vectors.
        trainable: Whether optimizers change them.
    """

    one_tensor = True

    embeddings: Variable
    anchor: Variable  # stands for the vectors in optimizers, if `table` holds them
    table: RemoteTable | None = None  # with parameter servers, which hold the vectors

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        embeddings_initializer: str = "random_uniform",
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.input_dim = integer("input_dim of Embedding", input_dim, 1)
        self.output_dim = integer("output_dim of Embedding", output_dim, 1)
        initializers.get(embeddings_initializer)
        self.embeddings_initializer = embeddings_initializer

    def build(self, input_shape: Any) -> None:  # noqa: ARG002
        shape = (self.input_dim, self.output_dim)
        make_table = self.replicator.make_table
        if make_table is None:
            self.add_variable("embeddings", shape, self.embeddings_initializer)
            return
        path, dtype = f"{self.path}/embeddings", np.dtype(self.dtype)
        make = initializers.get(self.embeddings_initializer)

        def block(number: int, size: int) -> np.ndarray:
            rows = min(size, self.input_dim - number * size)
            name = path if not number else f"{path}/{number}"
            return make((rows, self.output_dim), dtype, name)

        anchor = self.add_variable("anchor", (1,), "zeros")
        self.table = make_table(path, shape, dtype, block, anchor)

    def call(self, inputs: Any) -> Tensor:
        if inputs.dtype.kind not in "iu":
            raise UsageError(
                f"{users_line()}: layer {self.path!r} (Embedding) takes integers, got "
                f"{inputs.dtype}; before there are any, Input(shape, dtype='int64') or "
                "model.build(shape, dtype='int64') say so"
            )
        if self.table is not None:
            return lookup_rows(self.table, self.anchor, inputs)
        return ops.embedding(self.embeddings, inputs)
