"""RMSprop."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from allreduce.devices.integers import switch
from allreduce.optim.checks import checked
from allreduce.optim.native import NativeOptimizer
from allreduce.optim.options import Options


class RMSprop(NativeOptimizer):
    """Divide by a moving root of squares: `v` follows the square, `p -= rate * g / √(v + ε)`.

    With `centered`, the square of the moving mean is taken from `v`; with `momentum`, what is
    subtracted is a velocity, `u = momentum * u + rate * g / √(v + ε)`.

    Source: Tieleman and Hinton, Neural networks for machine learning, lecture 6.5 (2012); Graves,
    Generating sequences with recurrent neural networks (2013), section 4.2, for `centered`.

    Args:
        learning_rate: As for every `Optimizer`: a number of 0 or more, or a schedule.
        rho: The decay of the moving averages, from 0 to below 1.
        momentum: From 0 (none, and no slot) to below 1.
        epsilon: Keeps the quotient finite; above 0.
        centered: Whether to divide by an estimate of the standard deviation.
        options: As for every `Optimizer`.
    """

    kernel = "rmsprop"
    hyperparameters: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "rho", "momentum", "epsilon", "centered"),
    )

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho = checked("rho", rho, low=0.0, high=1.0)
        self.momentum = checked("momentum", momentum, low=0.0, high=1.0)
        self.epsilon = checked("epsilon", epsilon, low=0.0, above=True)
        self.centered = switch("centered", centered)
        slots = {"velocity": True, "mean": self.centered, "momentum": self.momentum > 0}
        self.slots = tuple(name for name, is_used in slots.items() if is_used)

    def numbers(self, step: int) -> list[float]:
        rho, centered = self.rho, float(self.centered)
        return [self.rate(step), rho, 1 - rho, self.epsilon, self.momentum, centered]
