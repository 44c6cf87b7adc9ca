"""Lion."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from allreduce.optim.checks import checked
from allreduce.optim.native import NativeOptimizer
from allreduce.optim.options import Options


class Lion(NativeOptimizer):
    """Move by a momentum's sign: `p -= rate * (sign(beta_1 * m + (1 - beta_1) * g) + decay * p)`.

    Then `m = beta_2 * m + (1 - beta_2) * g`.

    Source: Chen et al., Symbolic discovery of optimization algorithms (NeurIPS 2023), program 1.

    Args:
        learning_rate: As for every `Optimizer`: a number of 0 or more, or a schedule.
        beta_1: The share of the momentum in the sign, from 0 to below 1.
        beta_2: The momentum's decay, from 0 to below 1.
        weight_decay: How much of a weight each update takes away, times the learning rate.
        options: As for every `Optimizer`.
    """

    kernel = "lion"
    slots = ("m",)
    hyperparameters: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "beta_1", "beta_2", "weight_decay"),
    )

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = checked("beta_1", beta_1, low=0.0, high=1.0)
        self.beta_2 = checked("beta_2", beta_2, low=0.0, high=1.0)
        self.weight_decay = checked("weight_decay", weight_decay, low=0.0)

    def numbers(self, step: int) -> list[float]:
        first, second = self.beta_1, self.beta_2
        return [self.rate(step), first, 1 - first, second, 1 - second, self.weight_decay]
