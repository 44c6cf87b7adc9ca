"""Normalisation of batches and of samples."""

from __future__ import annotations

from typing import Any

from allreduce.devices.integers import switch
from allreduce.errors import ShapeError
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.variable import Variable
from allreduce.nn.core import calls
from allreduce.nn.core.checks import check_features
from allreduce.nn.core.layer import Layer
from allreduce.optim.checks import checked


class _Normalization(Layer):
    """Scale and shift by variables along the last axis."""

    one_tensor = True

    gamma: Variable
    beta: Variable
    features: int  # of what it was built for

    def __init__(
        self,
        epsilon: float,
        center: bool,
        scale: bool,
        name: str | None,
        dtype: str | None,
        trainable: bool,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        what = f"epsilon of {type(self).__name__}"
        self.epsilon = checked(what, epsilon, low=0, high=1, above=True)
        self.center = switch("center", center)
        self.scale = switch("scale", scale)

    def build(self, input_shape: Any) -> None:
        features = input_shape[-1] if len(input_shape) > 1 else None
        if not isinstance(features, int):
            raise ShapeError(
                f"layer {self.path!r} ({type(self).__name__}) takes inputs of shape "
                f"(batch, …, features), but got {show(input_shape)}"
            )
        self.features = features
        if self.scale:
            self.add_variable("gamma", (features,), "ones")
        if self.center:
            self.add_variable("beta", (features,), "zeros")

    def _scaled(self, x: Tensor) -> Tensor:
        if self.scale:
            x = ops.multiply(x, self.gamma)
        return ops.add(x, self.beta) if self.center else x


class LayerNorm(_Normalization):
    """Normalize the features of each sample, then scale and shift them.

    Args:
        epsilon: Added to the variance.
        center: Whether to shift, by a variable `beta`.
        scale: Whether to scale, by a variable `gamma`.
    """

    def __init__(
        self,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(epsilon, center, scale, name, dtype, trainable)

    def call(self, inputs: Tensor) -> Tensor:
        check_features(self, inputs, self.features)
        return self._scaled(ops.normalize(ops.cast(inputs, self.dtype), -1, self.epsilon))


class BatchNorm(_Normalization):
    """Normalize each feature over the batch, then scale and shift it.

    In training each replica uses the statistics of its own samples, or with `synchronized` of all
    replicas' samples. Otherwise, or if the layer or one that calls it is not trainable, it uses
    moving averages of all replicas' statistics, weighted by their samples and equal on all. A
    global batch without samples does not change them.

    Source: Ioffe and Szegedy, "Batch normalization" (ICML 2015), algorithms 1 and 2.

    Args:
        momentum: How much of the moving averages stays in a step.
        epsilon: Added to the variance.
        center: Whether to shift, by a variable `beta`.
        scale: Whether to scale, by a variable `gamma`.
        synchronized: Whether training uses the statistics of the global batch.
    """

    moving_mean: Variable
    moving_variance: Variable

    def __init__(
        self,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        *,
        synchronized: bool = False,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(epsilon, center, scale, name, dtype, trainable)
        self.momentum = checked("momentum of BatchNorm", momentum, low=0, high=1)
        self.synchronized = switch("synchronized", synchronized)

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        features = (input_shape[-1],)
        self.add_variable("moving_mean", features, "zeros", trainable=False)
        self.add_variable("moving_variance", features, "ones", trainable=False)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        check_features(self, inputs, self.features)
        x = ops.cast(inputs, self.dtype)
        if not training or calls.frozen():
            centred = ops.subtract(x, self.moving_mean)
            return self._scaled(centred / ops.sqrt(self.moving_variance + self.epsilon))
        axes = tuple(range(x.ndim - 1))
        if not self.synchronized:
            self._remember(*_own_moments(ops.stop_gradient(x), axes))
            return self._scaled(ops.normalize(x, axes, self.epsilon))
        count = ops.all_reduce(ops.size(x, axes, self.dtype))
        mean = ops.all_reduce(ops.sum(x, axes)) / count
        centred = x - mean
        variance = ops.all_reduce(ops.sum(ops.square(centred), axes)) / count
        self._average(count, ops.stop_gradient(mean), ops.stop_gradient(variance))
        return self._scaled(centred / ops.sqrt(variance + self.epsilon))

    def _remember(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Take all replicas' moments into the moving averages, by their numbers of samples."""
        parts = [mean * count, variance * count, ops.reshape(count, (1,))]
        sums = ops.all_reduce(ops.concatenate(parts))
        features = self.features
        total = sums[2 * features]
        self._average(total, sums[:features] / total, sums[features : 2 * features] / total)

    def _average(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        for moving, now in ((self.moving_mean, mean), (self.moving_variance, variance)):
            average = moving * self.momentum + now * (1 - self.momentum)
            moving.assign(ops.where(count > 0, average, moving))


def _own_moments(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of values per feature, their mean and their variance."""
    mean = ops.mean(x, axes)
    return ops.size(x, axes, x.dtype), mean, ops.mean(ops.square(x - mean), axes)
