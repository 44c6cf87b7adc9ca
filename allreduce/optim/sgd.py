"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from allreduce.devices.integers import switch
from allreduce.errors import UsageError
from allreduce.optim.checks import checked
from allreduce.optim.native import NativeOptimizer
from allreduce.optim.options import Options


class SGD(NativeOptimizer):
    """Stochastic gradient descent: `p -= rate * g`, or with momentum `v = momentum * v - rate * g`.

    With momentum, `p += v`; with `nesterov`, `p += momentum * v - rate * g`.

    Source: Polyak, Some methods of speeding up the convergence of iteration methods (1964);
    Sutskever et al., On the importance of initialization and momentum in deep learning (ICML 2013),
    section 2, for Nesterov's form.

    Args:
        learning_rate: As for every `Optimizer`: a number of 0 or more, or a schedule.
        momentum: From 0 (none, and no slot) to below 1.
        nesterov: Look ahead; needs momentum.
        options: As for every `Optimizer`.
    """

    kernel = "sgd"
    hyperparameters: ClassVar[tuple[str, ...]] = ("learning_rate", "momentum", "nesterov")

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.momentum = checked("momentum", momentum, low=0.0, high=1.0)
        self.nesterov = switch("nesterov", nesterov)
        if self.nesterov and not self.momentum:
            raise UsageError("SGD(nesterov=True) needs momentum above 0")
        self.slots = ("momentum",) if self.momentum else ()

    def numbers(self, step: int) -> list[float]:
        return [self.rate(step), self.momentum, float(self.nesterov)]
