"""Adam."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Unpack

from allreduce.optim.checks import checked
from allreduce.optim.native import NativeOptimizer
from allreduce.optim.options import Options


class Adam(NativeOptimizer):
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

    kernel = "adam"
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

    def numbers(self, step: int) -> list[float]:
        rate, first, second = self.rate(step), self.beta_1, self.beta_2
        corrected = rate * math.sqrt(1 - second**step) / (1 - first**step)
        kept = 1 - rate * self.weight_decay
        # The kernel rounds 1 - beta, in float32 far more exact than 1 less a rounded beta.
        return [corrected, first, 1 - first, second, 1 - second, self.epsilon, kept]


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
