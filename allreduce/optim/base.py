"""The base class of optimizers: hyperparameters, and the update of one bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from allreduce.errors import UsageError
from allreduce.graph import (
    apply_gradients,
    consolidate,
    finish_update,
    load_optimizer_state,
    minimize,
    optimizer_state,
)
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.update import UpdateRule, Updates
from allreduce.keywords import Refusing, explain
from allreduce.optim import schedules
from allreduce.optim.options import (
    AVERAGE,
    NAMES,
    Groups,
    Options,
    check_groups,
    check_options,
    update_with_options,
)

# Methods of other libraries' optimizers, and what does the same.
_ELSEWHERE: Mapping[str, str] = {
    "apply_gradients": "apply(gradients, variables) takes two lists, inside an ar.function",
    "lr": "it is called learning_rate",
    "step": "minimize(loss, variables) takes a step, inside an ar.function",
    "zero_grad": "gradients belong to one step; leave it out",
}


class Optimizer(Refusing, UpdateRule):
    """Changes variables so that a loss falls.

    It belongs to the variables of its first step, which allocates its slots.
    A subclass names its slots and updates one bucket; everything else is common.

    Args:
        learning_rate: A number of 0 or more, or a schedule of `ar.optim.schedules`, or any function
            of the number of updates done; may be changed between steps.
        options: clip_norm, clip_value, ema_momentum, groups and gradient_accumulation;
            `ar.optim.Options` says what they do.

    Attributes:
        is_per_variable: Whether `update` needs each variable separately, as rules with norms do.

    Raises:
        UsageError: A keyword is unknown, or its value makes no sense.
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("learning_rate",)
    is_per_variable: ClassVar[bool] = False
    # For a subclass whose constructor does not call this one's.
    clip_value: float | None = None
    ema_momentum: float | None = None
    groups: Groups | None = None

    def __init__(self, learning_rate: Any, **options: Unpack[Options]) -> None:
        self.learning_rate = learning_rate
        self.iterations = 0  # the number of steps taken; maintained by the graph's updates
        vars(self).update(check_options(type(self), options))

    if not TYPE_CHECKING:  # else type checkers would believe that it has every attribute

        def __getattr__(self, name: str) -> Any:
            if name in _ELSEWHERE:
                message = f"{type(self).__name__} has no {name!r}: {_ELSEWHERE[name]}"
                raise AttributeError(message, name="", obj=self)
            return object.__getattribute__(self, name)  # raises as it has

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

    @property
    def constant_rate(self) -> float | None:
        """The learning rate, or None if a schedule gives it."""
        return None if callable(self._learning_rate) else float(self._learning_rate)

    def rate(self, step: int) -> float:
        """Return the learning rate of an update; for `update` and `native`.

        Args:
            step: The number of the update; the first is 1.

        Raises:
            UsageError: A schedule gives no finite number of 0 or more.
        """
        return schedules.at(self._learning_rate, step - 1)

    def check(self, step: int) -> None:
        """Compute an update's learning rate before its step begins, as a schedule may fail."""
        self.rate(step)

    @property
    def all_slots(self) -> tuple[str, ...]:
        """The names of all arrays kept for each parameter."""
        return (*self.slots, AVERAGE) if self.ema_momentum is not None else self.slots

    @property
    def average_slots(self) -> tuple[str, ...]:
        """The slots that average the parameters; copies of them where a loaded state has none."""
        return (AVERAGE,) if self.ema_momentum is not None else ()

    @property
    def is_elementwise(self) -> bool:
        """Whether any range may be updated by itself, as in sharded updates."""
        return not self.is_per_variable

    @property
    def fixed_options(self) -> dict[str, Any]:
        """The options that steps are traced for: whether it clips or averages, and its groups."""
        switches = ("clip_norm", "clip_value", "ema_momentum")
        return {name: getattr(self, name) is not None for name in switches} | {
            "groups": self.groups
        }

    @property
    def updates_at_once(self) -> bool:
        """Whether one call of `update` or `native` changes a bucket."""
        options = (self.clip_value, self.ema_momentum, self.groups)
        return not self.is_per_variable and all(each is None for each in options)

    def bucket_update(
        self, spans: Sequence[tuple[str, slice]], updates: Updates | None = None
    ) -> Callable[..., None]:
        """Return a function that updates one bucket, called as `update` is.

        Args:
            spans: Each variable's path and its range of the bucket.
            updates: Finds the update of a kind of device; None for `update` itself.
        """
        if self.updates_at_once:
            return super().bucket_update(spans, updates)
        return update_with_options(self, spans, updates)

    @contextmanager
    def averaged(self, variables: Sequence[Variable]) -> Iterator[None]:
        """Give variables their moving averages inside a with block; every rank enters it.

            with optimizer.averaged(model.trainable_variables):
                model.evaluate(x, y)

        Raises:
            UsageError: The optimizer keeps no average, or has not updated a variable yet.
        """
        if self.ema_momentum is None:
            raise UsageError(f"{type(self).__name__} keeps no average: give it ema_momentum=")
        state = self.state()
        for variable in variables:
            if f"{variable.name}/{AVERAGE}" not in state:
                raise UsageError(
                    f"there is no average of variable {variable.name!r}: this optimizer has not "
                    "updated it"
                )
        before = [variable.numpy() for variable in variables]
        try:
            for variable in variables:
                variable.assign(state[f"{variable.name}/{AVERAGE}"])
            yield
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

    @explain({"var_list": "pass the variables second, as in minimize(loss, variables)"})
    def minimize(self, loss: Tensor, variables: Sequence[Variable], weight: Any = None) -> None:
        """Take one step down the global mean of `loss`, inside `ar.function` or `strategy.run`.

        Args:
            loss: One value per sample `(batch,)`, or a scalar: the mean over this replica's rows.
            variables: The variables to update.
            weight: The weight of the loss, instead of its number of samples: unmasked tokens.
        """
        listed = _listed(variables)
        minimize(self, loss, listed, weight)
        check_groups(self, [each.name for each in listed])

    def apply(
        self, gradients: Sequence[Any], variables: Sequence[Variable], weight: Any = None
    ) -> None:
        """Average this replica's gradients (of its own mean) with all others' and take a step.

        Args:
            gradients: As returned by `ar.gradients`, one per variable.
            variables: The variables to update.
            weight: The weight of this replica's gradients; by default its number of rows.
        """
        listed = _listed(variables)
        if not isinstance(gradients, Iterable):
            raise UsageError(
                f"apply takes a list of gradients, one per variable, not {gradients!r}"
            )
        apply_gradients(self, list(gradients), listed, weight)
        check_groups(self, [each.name for each in listed])

    def finish_update(self) -> None:
        """Update with the micro-batches that are left at the end of a loop; all ranks call it.

        With `gradient_accumulation=4`, a loop of 10 steps leaves 2. `fit` calls this after each
        epoch. Without micro-batches since the latest update, it does nothing.

        Raises:
            UsageError: It was called inside a step.
        """
        finish_update(self)

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
        """Restore the result of `state`; also before the first step."""
        if not isinstance(state, Mapping):
            raise UsageError(f"load_state takes what state() returned, a dict, not {state!r:.60}")
        load_optimizer_state(self, dict(state))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, as plain data."""
        config = {name: getattr(self, name) for name in self.hyperparameters}
        if "learning_rate" in config:
            config["learning_rate"] = self._description or schedules.describe(
                self._learning_rate, self.iterations
            )
        config.update({name: value for name in NAMES if (value := getattr(self, name)) is not None})
        if self.gradient_accumulation == 1:
            del config["gradient_accumulation"]
        if self.groups is not None:  # ranks compare it; it cannot be saved
            config["groups"] = {"function": getattr(self.groups, "__qualname__", repr(self.groups))}
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
