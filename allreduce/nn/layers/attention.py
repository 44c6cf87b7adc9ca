"""Attention with several heads."""

from __future__ import annotations

from typing import Any

from allreduce.devices.integers import integer, switch
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import broadcasts_to, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.nn.core.layer import Layer
from allreduce.nn.layers.dense import Dense
from allreduce.optim.checks import checked


class MultiHeadAttention(Layer):
    """Let each position of a sequence attend to positions of another one, or of the same.

    Source: Vaswani et al., "Attention is all you need" (2017), section 3.2.2.

    It is called with one tensor `(batch, length, features)` for attention to itself, or with a
    tuple (query, value), (query, value, key) or (query, value, key, mask): the key is the value
    where it is None or omitted. The mask is boolean, True for keys that a query may attend to:
    `(queries, keys)`, `(batch, queries, keys)`, or a shape that broadcasts to `(batch, heads,
    queries, keys)`. The outputs have the query's shape.

    Args:
        num_heads: How many heads there are.
        key_dim: The features of each head's queries and keys.
        value_dim: And of its values; by default as many.
        dropout: The share of the weights that are dropped in training.
        use_bias: Whether the projections have biases.
        causal: Whether a position attends only to positions up to its own.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        *,
        use_bias: bool = True,
        causal: bool = False,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        kind = "MultiHeadAttention"
        self.num_heads = integer(f"num_heads of {kind}", num_heads, 1)
        self.key_dim = integer(f"key_dim of {kind}", key_dim, 1)
        self.value_dim = integer(
            f"value_dim of {kind}", key_dim if value_dim is None else value_dim, 1
        )
        self.dropout = checked(f"dropout of {kind}", dropout, low=0, high=1)
        self.use_bias = switch("use_bias", use_bias)
        self.causal = switch("causal", causal)

    def build(self, input_shape: Any) -> None:
        several = bool(input_shape) and isinstance(input_shape[0], tuple)
        shape = input_shape[0] if several else input_shape
        if len(shape) != 3 or not isinstance(shape[-1], int):
            raise ShapeError(
                f"layer {self.path!r} (MultiHeadAttention) takes queries of shape (batch, length, "
                f"features), but got {show(shape)}"
            )
        self.query = self._projection(self.num_heads * self.key_dim, "query")
        self.key = self._projection(self.num_heads * self.key_dim, "key")
        self.value = self._projection(self.num_heads * self.value_dim, "value")
        self.output = self._projection(shape[-1], "output")

    def _projection(self, units: int, name: str) -> Dense:
        return Dense(units, use_bias=self.use_bias, name=name, dtype=self.dtype)

    def call(self, inputs: Any, training: bool = False) -> Tensor:
        query, value, key, mask = self._taken(inputs)
        attended = ops.scaled_dot_product_attention(
            self._heads(self.query(query)),
            self._heads(self.key(key)),
            self._heads(self.value(value)),
            mask,
            self.causal,
            self.dropout if training else 0.0,
        )
        together = ops.transpose(attended, (0, 2, 1, 3))
        joined = ops.reshape(together, (*query.shape[:2], self.num_heads * self.value_dim))
        outputs = self.output(joined)
        assert isinstance(outputs, Tensor)
        return outputs

    def _taken(self, inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs, inputs)
        if not 2 <= len(given) <= 4:
            raise UsageError(
                f"layer {self.path!r} (MultiHeadAttention) is called with one tensor, or with "
                f"(query, value, key, mask) of which the last two may be left out, not {len(given)}"
            )
        query, value, key, mask = (*given, None, None)[:4]
        key = value if key is None else key
        for what, each in (("query", query), ("value", value), ("key", key)):
            if each is None or each.ndim != 3 or each.dtype == bool:
                raise UsageError(
                    f"{users_line()}: layer {self.path!r} (MultiHeadAttention) takes a {what} "
                    f"(batch, length, features), not {each if each is None else each.spec}; a mask "
                    "comes fourth: (query, value, None, mask)"
                )
        return query, value, key, None if mask is None else self._for_heads(mask, query, key)

    def _for_heads(self, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Check a mask, and let one of three axes be the same for all heads."""
        scores = (query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        wide = ops.expand_dims(mask, 1) if mask.ndim == 3 else mask
        if not broadcasts_to(wide.shape, scores):
            raise ShapeError(
                f"{users_line()}: layer {self.path!r} (MultiHeadAttention) takes a mask (queries, "
                "keys), (batch, queries, keys), or what broadcasts to (batch, heads, queries, "
                f"keys), here {show(scores)}, but got one of shape {show(mask.shape)}"
            )
        return wide

    def _heads(self, x: Tensor) -> Tensor:
        """Cut the features into heads: `(batch, heads, length, features)`."""
        each = x.shape[-1]
        assert isinstance(each, int)
        shape = (*x.shape[:2], self.num_heads, each // self.num_heads)
        return ops.transpose(ops.reshape(x, shape), (0, 2, 1, 3))
