"""The base class of optimizers with a native kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from allreduce import _native
from allreduce.graph.update.update import NativeUpdate
from allreduce.optim.base import Optimizer


class NativeOptimizer(Optimizer):
    """An optimizer whose update is one kernel, over whole buckets or where gradients are reduced.

    If it `is_per_variable`, the kernel gets one variable, after the gradients are reduced.

    Attributes:
        kernel: Its name in `kRules` of `kernels/cpu/nn/tensor_kernels.h`.
    """

    kernel: ClassVar[str]

    @abstractmethod
    def numbers(self, step: int) -> list[float]:
        """Return the kernel's numbers after the count of samples; it rounds them to its dtype.

        Args:
            step: The number of the update; the first is 1.
        """

    def update(
        self,
        parameters: np.ndarray,
        gradients: np.ndarray,
        slots: Mapping[str, np.ndarray],
        count: np.ndarray,
        step: int,
    ) -> None:
        own, numbers = [slots[name] for name in self.slots], self.numbers(step)
        _native.apply_rule(self.kernel, parameters, gradients, own, count, numbers)

    def native(self, header: np.ndarray, slots: Mapping[str, np.ndarray]) -> NativeUpdate | None:
        if not self.slots or self.is_per_variable:
            return None
        made = _native.rule_update(self.kernel, header, [slots[name] for name in self.slots])
        return NativeUpdate(made, lambda step: made.set(self.numbers(step)))
