"""Adagrad."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from allreduce.optim.checks import checked
from allreduce.optim.native import NativeOptimizer
from allreduce.optim.options import Options


class Adagrad(NativeOptimizer):
    """Divide by the root of all squares so far: `a += g²`, `p -= rate * g / √(a₀ + a + ε)`.

    Source: Duchi, Hazan and Singer, Adaptive subgradient methods for online learning and stochastic
    optimization (JMLR 2011), figure 1, for diagonal matrices.

    Args:
        learning_rate: As for every `Optimizer`: a number of 0 or more, or a schedule.
        initial_accumulator_value: The initial sum of squares, a₀; the slot starts at 0.
        epsilon: Keeps the quotient finite; above 0.
        options: As for every `Optimizer`.
    """

    kernel = "adagrad"
    slots = ("accumulator",)
    hyperparameters: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "initial_accumulator_value", "epsilon"),
    )

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.initial_accumulator_value = checked(
            "initial_accumulator_value", initial_accumulator_value, low=0.0
        )
        self.epsilon = checked("epsilon", epsilon, low=0.0, above=True)

    def numbers(self, step: int) -> list[float]:
        return [self.rate(step), self.initial_accumulator_value + self.epsilon]
