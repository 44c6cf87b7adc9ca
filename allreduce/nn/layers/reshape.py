"""Another shape for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from allreduce.devices.integers import integer
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.nn.core.layer import Layer


class Reshape(Layer):
    """Gives each sample another shape: `(batch, …)` to `(batch, *target_shape)`.

    Args:
        target_shape: The shape of one sample, without the batch; one size may be -1.
    """

    one_tensor = True

    def __init__(
        self,
        target_shape: int | Sequence[int],
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        given = target_shape if isinstance(target_shape, Iterable) else (target_shape,)
        sizes = tuple(integer("a size of Reshape's target_shape", size, -1) for size in given)
        if sizes.count(-1) > 1 or 0 in sizes:
            raise UsageError(
                "Reshape takes the shape of one sample, sizes above 0 of which one may be -1, not "
                f"{target_shape!r}"
            )
        self.target_shape = sizes

    def call(self, inputs: Tensor) -> Tensor:
        sizes: list[Any] = list(self.target_shape)
        total = prod(inputs.shape[1:])
        known = prod(size for size in sizes if size != -1)
        if total % known or (-1 not in sizes and total != known):
            raise ShapeError(
                f"{users_line()}: layer {self.path or self.name!r} cannot give "
                f"{show(inputs.shape)} the shape {show((inputs.shape[0], *sizes))}: a sample has "
                f"{total} elements"
            )
        found = [total // known if size == -1 else size for size in sizes]
        return ops.reshape(inputs, (inputs.shape[0], *found))
