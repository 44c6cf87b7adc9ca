"""The base class of optimizers: hyperparameters, and the update of one bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from allreduce.errors import UsageError
from allreduce.graph import (
    apply_gradients,
    consolidate,
    load_optimizer_state,
    minimize,
    optimizer_state,
)
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.update import NativeUpdate
from allreduce.optim import schedules


class Optimizer(ABC):
    """Changes variables so that a loss falls.

    It belongs to the variables of its first step, which allocates its slots.
    A subclass names its slots and updates one bucket; everything else is common.

    Args:
        learning_rate: A number of 0 or more, or a schedule of `ar.optim.schedules`, or any function
            of the number of updates done; may be changed between steps.
    """

    slots: tuple[str, ...] = ()
    hyperparameters: ClassVar[tuple[str, ...]] = ("learning_rate",)

    def __init__(self, learning_rate: Any) -> None:
        self.learning_rate = learning_rate
        self.iterations = 0  # the number of steps taken; maintained by the graph's updates

    @property
    def learning_rate(self) -> float:
        """The factor of the next update; an assignment takes effect at the next step."""
        return schedules.at(self._learning_rate, self.iterations)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._learning_rate = schedules.get(value)
        # Ranks compare it in every step; that of a function changes.
        rate = self._learning_rate
        whole = isinstance(rate, schedules.Schedule) or not callable(rate)
        self._description = schedules.describe(rate, 0) if whole else None

    def rate(self, step: int) -> float:
        """Return the learning rate of an update; for `update` and `native`.

        Args:
            step: The number of the update; the first is 1.

        Raises:
            UsageError: A schedule gives no finite number of 0 or more.
        """
        return schedules.at(self._learning_rate, step - 1)

    @abstractmethod
    def update(
        self,
        parameters: np.ndarray,
        gradients: np.ndarray,
        slots: Mapping[str, np.ndarray],
        count: np.ndarray,
        step: int,
    ) -> None:
        """Update one bucket in place, in one pass over its memory.

        Args:
            parameters: A contiguous range of them, `(n,)`.
            gradients: Their gradients' sum over all replicas, `(n,)`.
            slots: For each of `slots` the same range of it, `(n,)`.
            count: The number of samples to divide the gradients by, `(1,)`.
            step: The number of this update; the first is 1.
        """

    def native(
        self,
        header: np.ndarray,  # noqa: ARG002  # of those who have one
        slots: Mapping[str, np.ndarray],  # noqa: ARG002
    ) -> NativeUpdate | None:
        """Return the same update for native code, if there is one.

        With it, and slots, every replica of a host updates but its own slice of a large bucket. It
        is not used where `update` has been replaced further down, by a subclass or on the instance.

        Args:
            header: Its first element is the number of samples to divide the gradients by.
            slots: For each of `slots` the bucket's range of it, `(n,)`; to be changed in place.
        """
        return None

    def minimize(self, loss: Tensor, variables: Sequence[Variable], weight: Any = None) -> None:
        """Take one step down the global mean of `loss`, inside `ar.function` or `strategy.run`.

        Args:
            loss: One value per sample `(batch,)`, or a scalar: the mean over this replica's rows.
            variables: The variables to update.
            weight: The weight of the loss, instead of its number of samples: unmasked tokens.
        """
        minimize(self, loss, _listed(variables), weight)

    def apply(
        self, gradients: Sequence[Any], variables: Sequence[Variable], weight: Any = None
    ) -> None:
        """Average this replica's gradients (of its own mean) with all others' and take a step.

        Args:
            gradients: As returned by `ar.gradients`, one per variable.
            variables: The variables to update.
            weight: The weight of this replica's gradients; by default its number of rows.
        """
        apply_gradients(self, list(gradients), _listed(variables), weight)

    def consolidate(self) -> None:
        """All-gather slots that ranks hold in shards; all ranks call it.

        With `ar.config.set_shard_everywhere(True)`, one rank can then save the state until the
        next step. Otherwise any rank always can, and this does nothing.

        Raises:
            UsageError: It was called inside a step.
            ClosedError: The variables' strategy is closed, or an error has ended it.
        """
        consolidate(self)

    def state(self) -> dict[str, np.ndarray]:
        """Copy its slots, as "<variable name>/<slot>", and "iterations"."""
        return optimizer_state(self)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state` gave; before the first step too."""
        load_optimizer_state(self, dict(state))

    def get_config(self) -> dict[str, Any]:
        """Give the constructor's arguments, as plain data."""
        config = {name: getattr(self, name) for name in self.hyperparameters}
        if "learning_rate" in config:
            config["learning_rate"] = self._description or schedules.describe(
                self._learning_rate, self.iterations
            )
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Optimizer:
        """Make the optimizer that `get_config` described."""
        return cls(**config)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.hyperparameters)
        return f"{type(self).__name__}({values})"


def _listed(variables: Any) -> list[Variable]:
    if isinstance(variables, Variable | Tensor) or not isinstance(variables, Iterable):
        raise UsageError(
            f"an optimizer changes a list of variables, such as model.trainable_variables, not "
            f"{variables!r}"
        )
    return list(variables)
