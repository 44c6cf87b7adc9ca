"""LAMB."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from allreduce.optim.checks import checked
from allreduce.optim.native import NativeOptimizer
from allreduce.optim.options import Options


class Lamb(NativeOptimizer):
    """Adam with a learning rate for each variable, in proportion to its norm over its update's.

    With the unbiased moments m̂ and v̂ of Adam, `r = m̂ / (√v̂ + ε) + weight_decay * p` and
    `p -= rate * ‖p‖ / ‖r‖ * r`; the quotient is 1 where a norm is 0.

    Source: You et al., Large batch optimization for deep learning: training BERT in 76 minutes
    (ICLR 2020), algorithm 2, with φ(z) = z.

    Args:
        learning_rate: As for every `Optimizer`: a number of 0 or more, or a schedule.
        beta_1: The first moment's decay, from 0 to below 1.
        beta_2: The second moment's decay, from 0 to below 1.
        epsilon: Keeps the quotient finite; above 0.
        weight_decay: The fraction of a weight that is added to its update.
        options: As for every `Optimizer`; `groups` can set `weight_decay` to 0 for biases.
    """

    kernel = "lamb"
    slots = ("m", "v")
    is_per_variable = True
    hyperparameters: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "beta_1", "beta_2", "epsilon", "weight_decay"),
    )

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = checked("beta_1", beta_1, low=0.0, high=1.0)
        self.beta_2 = checked("beta_2", beta_2, low=0.0, high=1.0)
        self.epsilon = checked("epsilon", epsilon, low=0.0, above=True)
        self.weight_decay = checked("weight_decay", weight_decay, low=0.0)

    def numbers(self, step: int) -> list[float]:
        first, second = self.beta_1, self.beta_2
        moments = [first, 1 - first, second, 1 - second, self.epsilon, self.weight_decay]
        return [self.rate(step), *moments, 1 - first**step, 1 - second**step]
