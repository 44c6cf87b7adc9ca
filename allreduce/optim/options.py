"""The options of every optimizer, and the update of a bucket that uses them.

Where none is set, a bucket is updated by one call of `Optimizer.update`, in one pass over memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from allreduce.devices.integers import integer
from allreduce.errors import UsageError, unknown_name
from allreduce.graph.update.update import Updates
from allreduce.keywords import unknown_argument
from allreduce.optim.checks import checked

Groups = Callable[[str], Mapping[str, Any]]
AVERAGE = "weights_average"  # the slot of the weights' average


class Options(TypedDict, total=False):
    """Keywords that every optimizer takes.

    Attributes:
        clip_norm: The largest Euclidean norm of all mean gradients together; larger ones are scaled
            down to it (Pascanu et al. 2013, section 3.2).
        clip_value: The largest absolute value of each element of a mean gradient.
        ema_momentum: Keep a moving average of the weights, `average = ema_momentum * average +
            (1 - ema_momentum) * weights` after each update, for `averaged`.
        groups: Maps a variable's path ("dense/kernel") to a dict of its different hyperparameters,
            such as `{"weight_decay": 0.0}`, and `"learning_rate_factor"`.
        gradient_accumulation: How many steps, each with a micro-batch, make an update. Their
            gradients are added up; the last step reduces them and changes the variables.
    """

    clip_norm: float | None
    clip_value: float | None
    ema_momentum: float | None
    groups: Groups | None
    gradient_accumulation: int


NAMES = tuple(Options.__annotations__)
# Keras's names, and their equivalents here.
_KERAS = {
    "clipnorm": "clip_norm= limits the norm of all gradients together; there is none for each",
    "global_clipnorm": "the argument is called clip_norm=",
    "clipvalue": "the argument is called clip_value=",
    "use_ema": "ema_momentum= alone switches the average on",
    "loss_scale_factor": "losses are not scaled: bfloat16 has float32's range",
    "weight_decay": "AdamW, LAMB, LARS and Lion have it",
    "lr": "the argument is called learning_rate=",
    "decay": "pass a schedule as learning_rate=, such as ar.optim.schedules.InverseTimeDecay",
    "amsgrad": "there is no such variant here",
    "name": "saved models have its class alone",
    "gradient_accumulation_steps": "the argument is called gradient_accumulation=",
}


def check_options(kind: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keywords that an optimizer's constructor handed on, and complete them.

    Args:
        kind: The optimizer's class.
        options: The arguments.

    Raises:
        UsageError: There is no such keyword, or its value makes no sense.
    """
    for name in options:
        if name not in NAMES:
            known = [*kind.hyperparameters, *NAMES]
            raise unknown_argument(kind.__name__, name, known, _KERAS)
    found: dict[str, Any] = {name: options.get(name) for name in NAMES}
    for name, high in (("clip_norm", np.inf), ("clip_value", np.inf), ("ema_momentum", 1.0)):
        if found[name] is not None:
            found[name] = checked(name, found[name], low=0.0, high=high, above=True)
    found["gradient_accumulation"] = micro_batches(options.get("gradient_accumulation", 1))
    if found["groups"] is not None and not callable(found["groups"]):
        raise UsageError(
            f"groups is a function of a variable's path that gives a dict of hyperparameters, not "
            f"{found['groups']!r}"
        )
    return found


def micro_batches(count: Any) -> int:
    """Check the number of micro-batches in an update."""
    return integer("gradient_accumulation", count, 1)


class Group:
    """Makes the update of a group of variables, some of whose hyperparameters are others.

    Args:
        optimizer: The optimizer.
        changed: The hyperparameters of this group.

    Attributes:
        rule: A copy of the optimizer, with this group's hyperparameters and learning rate; itself
            if nothing is changed.
    """

    def __init__(self, optimizer: Any, changed: Mapping[str, Any]) -> None:
        self._optimizer, self._changed = optimizer, dict(changed)
        factor = self._changed.pop("learning_rate_factor", 1.0)
        if factor != 1.0:
            self._changed["rate"] = lambda step: float(optimizer.rate(step) * factor)
        self.rule = copy.copy(optimizer) if changed else optimizer

    def renew(self) -> None:
        """Take the optimizer's present settings over."""
        if self.rule is self._optimizer:
            return
        vars(self.rule).update(vars(self._optimizer))
        for name, value in self._changed.items():
            setattr(self.rule, name, value)


def _hyperparameters_of(optimizer: Any, path: str) -> dict[str, Any]:
    """Return what `groups` changes for a variable.

    Raises:
        UsageError: That is no dict, has an unknown hyperparameter, or a value that makes no sense.
    """
    changed = (optimizer.groups(path) if optimizer.groups else None) or {}
    kind = type(optimizer).__name__
    if not isinstance(changed, Mapping):
        raise UsageError(f"groups({path!r}) of {kind} is a dict or None, not {changed!r}")
    known = [name for name in optimizer.hyperparameters if name != "learning_rate"]
    usual = {name: getattr(optimizer, name) for name in known} | {"learning_rate_factor": 1.0}
    for name, value in changed.items():
        if name not in usual:
            raise unknown_name("hyperparameter", name, usual, f"groups of {kind}")
        if isinstance(usual[name], int | float) and not isinstance(usual[name], bool):
            checked(f"{name} in groups({path!r}) of {kind}", value, low=0.0)
    return dict(changed)


def check_groups(optimizer: Any, paths: Sequence[str]) -> None:
    """Check what `groups` gives while a step is traced: all ranks can go on after an error then.

    Args:
        optimizer: The optimizer.
        paths: Those of the step's variables.

    Raises:
        UsageError: It changes a hyperparameter that the optimizer does not have, or wrongly.
    """
    for path in paths if optimizer.groups else ():
        _hyperparameters_of(optimizer, path)


@dataclass(frozen=True)
class Part:
    """A range of a bucket that is updated by one call: one variable, or several of one group."""

    group: Group
    part: slice


def parts_of(optimizer: Any, spans: Sequence[tuple[str, slice]]) -> list[Part]:
    """Cut a bucket into the ranges that its update treats alike.

    Args:
        optimizer: The optimizer.
        spans: Each variable's path and its range of the bucket.
    """
    groups: dict[str, Group] = {}
    found: list[Part] = []
    for path, span in spans:
        changed = _hyperparameters_of(optimizer, path)
        key = repr(sorted(changed.items()))
        if key not in groups:
            groups[key] = Group(optimizer, changed)
        group, last = groups[key], found[-1] if found else None
        if last is not None and last.group is group and not optimizer.is_per_variable:
            found[-1] = Part(group, slice(last.part.start, span.stop))
        else:
            found.append(Part(group, span))
    return found


def update_with_options(
    optimizer: Any, spans: Sequence[tuple[str, slice]], updates: Updates | None = None
) -> Callable[..., None]:
    """Make a bucket's update: `Optimizer.update` with the options, per variable.

    Args:
        optimizer: The optimizer.
        spans: Each variable's path and its range of the bucket.
        updates: Finds the update of a kind of device, which applies the options itself.
    """
    parts = parts_of(optimizer, spans)
    on_host = updates is None
    kind = type(optimizer)
    rules = [each.group.rule for each in parts]
    run = [rule.update if updates is None else updates(rule, kind) for rule in rules]

    def update(
        parameters: np.ndarray,
        gradients: np.ndarray,
        slots: Mapping[str, np.ndarray],
        count: np.ndarray,
        step: int,
    ) -> None:
        limit = optimizer.clip_value
        if on_host and limit is not None:
            np.clip(gradients, -limit * count, limit * count, out=gradients)
        for each, change in zip(parts, run, strict=True):
            each.group.renew()
            own = {
                name: array[each.part]
                for name, array in slots.items()
                if not on_host or name != AVERAGE
            }
            change(parameters[each.part], gradients[each.part], own, count, step)
        momentum = optimizer.ema_momentum
        if on_host and momentum is not None:
            average = slots[AVERAGE]
            kept = momentum if step > 1 else 0.0
            average *= kept
            average += (1 - kept) * parameters

    return update
