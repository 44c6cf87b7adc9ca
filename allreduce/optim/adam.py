"""Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import numpy as np

from allreduce import _native
from allreduce.graph.update.update import NativeUpdate
from allreduce.optim.base import Optimizer
from allreduce.optim.checks import checked
from allreduce.optim.options import Options


class Adam(Optimizer):
    """Adaptive moments: `m` and `v` follow gradient and square, `p -= rate_t * m / (√v + ε)`.

    `rate_t = rate * √(1 - beta_2^t) / (1 - beta_1^t)`: the form with "epsilon hat" at the end of
    the paper's section 2, as Keras has it.

    Source: Kingma and Ba, Adam: a method for stochastic optimization (ICLR 2015), algorithm 1.

    Args:
        learning_rate: As for every `Optimizer`: a number of 0 or more, or a schedule.
        beta_1: The first moment's decay, from 0 to below 1.
        beta_2: The second moment's decay, from 0 to below 1.
        epsilon: Keeps the quotient finite; above 0.
        options: As for every `Optimizer`.
    """

    weight_decay = 0.0
    slots = ("m", "v")
    hyperparameters: ClassVar[tuple[str, ...]] = ("learning_rate", "beta_1", "beta_2", "epsilon")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = checked("beta_1", beta_1, low=0.0, high=1.0)
        self.beta_2 = checked("beta_2", beta_2, low=0.0, high=1.0)
        self.epsilon = checked("epsilon", epsilon, low=0.0, above=True)

    def update(
        self,
        parameters: np.ndarray,
        gradients: np.ndarray,
        slots: Mapping[str, np.ndarray],
        count: np.ndarray,
        step: int,
    ) -> None:
        _native.adam(
            parameters,
            gradients,
            slots["m"],
            slots["v"],
            count,
            self.rate(step),
            self.beta_1,
            self.beta_2,
            self.epsilon,
            step,
            self.weight_decay,
        )

    def native(self, header: np.ndarray, slots: Mapping[str, np.ndarray]) -> NativeUpdate:
        made = _native.adam_update(header, slots["m"], slots["v"])

        def prepare(step: int) -> None:
            rate, decay = self.rate(step), self.weight_decay
            made.set(rate, self.beta_1, self.beta_2, self.epsilon, decay, step)

        return NativeUpdate(made, prepare)


class AdamW(Adam):
    """Adam with decoupled weight decay: before each update, `p -= rate * weight_decay * p`.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization (ICLR 2019), algorithm 2.

    Args:
        learning_rate: As for every `Optimizer`: a number of 0 or more, or a schedule.
        weight_decay: How much of a weight each update takes away, times the learning rate.
        beta_1: The first moment's decay, from 0 to below 1.
        beta_2: The second moment's decay, from 0 to below 1.
        epsilon: Keeps the quotient finite; above 0.
        options: As for every `Optimizer`; `groups` can switch the decay off for biases.
    """

    hyperparameters = ("learning_rate", "weight_decay", "beta_1", "beta_2", "epsilon")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **options)
        self.weight_decay = checked("weight_decay", weight_decay, low=0.0)
