"""A hand-written NumPy loop by an expert: every array is allocated once and reused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from workloads import chain
from workloads.base import BETA_1, BETA_2, EPSILON, LEARNING_RATE, Array, Workload

_ABOUT = f"NumPy {np.__version__}"


def build(
    name: str, workload: Workload, rank: int, ports: Sequence[int]
) -> tuple[int, Chain | Dense]:
    """Make the only process's part."""
    return 0, _LOOPS[workload.name](workload)


class Dense:
    """Dense layers with rectifiers, cross-entropy and Adam; all parameters in one array."""

    about = _ABOUT

    def __init__(self, workload: Workload) -> None:
        first = workload.first_weights()
        size = sum(each.size for each in first.values())
        self._flat, self._gradient, self._m, self._v, self._spare = (
            np.zeros(size, np.float32) for _ in range(5)
        )
        weights, gradients, start = [], [], 0
        for each in first.values():
            part = slice(start, start + each.size)
            weights.append(self._flat[part].reshape(each.shape))
            gradients.append(self._gradient[part].reshape(each.shape))
            weights[-1][...] = each
            start += each.size
        self._kernels, self._biases = weights[::2], weights[1::2]
        self._dkernels, self._dbiases = gradients[::2], gradients[1::2]
        rows, sizes = workload.rows, [len(each) for each in self._biases]
        self._h = [np.empty((rows, each), np.float32) for each in sizes]
        self._d = [np.empty((rows, each), np.float32) for each in sizes]
        self._positive = [np.empty((rows, each), bool) for each in sizes]
        self._rows, self._column = np.arange(rows), np.empty((rows, 1), np.float32)
        self._steps = 0

    def step(self, *batch: Array) -> float:
        """Do one step; returns the loss."""
        x, labels = batch
        loss = self._forward(x, labels)
        for i in range(len(self._h) - 1, -1, -1):
            below = self._h[i - 1] if i else x
            np.matmul(below.T, self._d[i], out=self._dkernels[i])
            self._d[i].sum(0, out=self._dbiases[i])
            if i:
                np.matmul(self._d[i], self._kernels[i].T, out=self._d[i - 1])
                np.greater(below, 0, out=self._positive[i - 1])
                self._d[i - 1] *= self._positive[i - 1]
        self._adam()
        return loss

    def _forward(self, x: Array, labels: Array) -> float:
        """Compute all layers, and the gradient of the last one's sums; returns the loss."""
        for i, h in enumerate(self._h):
            np.matmul(x, self._kernels[i], out=h)
            h += self._biases[i]
            if i < len(self._h) - 1:
                np.maximum(h, 0, out=h)
            x = h
        d, column = self._d[-1], self._column
        x.max(axis=1, keepdims=True, out=column)
        x -= column
        np.exp(x, out=d)
        d.sum(axis=1, keepdims=True, out=column)
        loss = float((np.log(column[:, 0]) - x[self._rows, labels]).mean())
        d /= column
        d[self._rows, labels] -= 1
        d /= len(d)
        return loss

    def _adam(self) -> None:
        self._steps += 1
        rate = LEARNING_RATE * (1 - BETA_2**self._steps) ** 0.5 / (1 - BETA_1**self._steps)
        g, m, v, spare = self._gradient, self._m, self._v, self._spare
        m *= BETA_1
        np.multiply(g, 1 - BETA_1, out=spare)
        m += spare
        v *= BETA_2
        np.multiply(g, g, out=spare)
        spare *= 1 - BETA_2
        v += spare
        np.sqrt(v, out=spare)
        spare += EPSILON
        np.divide(m, spare, out=spare)
        spare *= rate
        self._flat -= spare

    def number(self, result: float) -> float:
        return result

    def figures(self, seconds: float) -> dict[str, float]:
        return {}


class Chain:
    """The chain of operations, each of which writes over its input."""

    about = _ABOUT

    def __init__(self, workload: Workload) -> None:
        self._out = np.empty(workload.rows, np.float32)

    def step(self, *batch: Array) -> Array:
        """Compute the chain."""
        (x,) = batch
        for name, operand in chain.LINKS:
            getattr(np, name)(x, np.float32(operand), out=self._out)
            x = self._out
        return x

    def number(self, result: Array) -> float:
        return float(result.mean())

    def figures(self, seconds: float) -> dict[str, float]:
        return {}


_LOOPS: dict[str, Callable[[Workload], Chain | Dense]] = {
    "mlp": Dense,
    "small": Dense,
    "chain": Chain,
}
