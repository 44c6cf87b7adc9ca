"""LARS."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from allreduce.optim.checks import checked
from allreduce.optim.native import NativeOptimizer
from allreduce.optim.options import Options


class LARS(NativeOptimizer):
    """Momentum with a learning rate for each variable: its norm over its gradient's.

    `v = momentum * v + rate * trust * (g + weight_decay * p)`, `p -= v`, where `trust =
    trust_coefficient * ‖p‖ / (‖g‖ + weight_decay * ‖p‖)`; 1 where a norm is 0.

    Source: You, Gitman and Ginsburg, Large batch training of convolutional networks (2017),
    algorithm 1.

    Args:
        learning_rate: As for every `Optimizer`: a number of 0 or more, or a schedule.
        momentum: The velocity's decay, from 0 to below 1.
        weight_decay: The fraction of a weight that is added to its gradient.
        trust_coefficient: The paper's η.
        options: As for every `Optimizer`; `groups` can set `weight_decay` to 0 for biases.
    """

    kernel = "lars"
    slots = ("momentum",)
    is_per_variable = True
    hyperparameters: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "momentum", "weight_decay", "trust_coefficient"),
    )

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.momentum = checked("momentum", momentum, low=0.0, high=1.0)
        self.weight_decay = checked("weight_decay", weight_decay, low=0.0)
        self.trust_coefficient = checked("trust_coefficient", trust_coefficient, low=0.0)

    def numbers(self, step: int) -> list[float]:
        return [self.rate(step), self.momentum, self.weight_decay, self.trust_coefficient]
