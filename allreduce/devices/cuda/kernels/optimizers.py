"""Updates of optimizers, one pass over a range of an arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels.layout import suffix
from allreduce.devices.cuda.modules import blocks, launch

Update = Callable[[Any, Any, Mapping[str, Any], Any, int], None]


def _run(name: str, parameters: Any, arrays: list[Any], numbers: list[float], more: str) -> None:
    """Launch an update over all elements of a range.

    Args:
        name: The kernel's, without its dtype.
        parameters: The range.
        arrays: Gradients, slots and count.
        numbers: Settings.
        more: The types of `numbers`.
    """
    if parameters.size:
        launch(
            *("optimizers", f"{name}_{suffix(parameters.dtype)}", blocks(parameters.size)),
            f"{'P ' * (1 + len(arrays))}{more} q",
            *(pointer(parameters), *map(pointer, arrays), *numbers, parameters.size),
        )


def sgd(rule: Any) -> Update:
    """Return the update of SGD."""

    def update(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        if not slots:
            _run("sgd", p, [g, count], [rule.rate(step)], "d")
            return
        numbers = [rule.rate(step), rule.momentum, int(rule.nesterov)]
        _run("momentum", p, [g, slots["momentum"], count], numbers, "d d i")

    return update


def adam(rule: Any) -> Update:
    """Return the update of Adam and AdamW; the form of kernels/cpu/nn/optimizer_steps.h."""

    def update(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        rate = rule.rate(step)
        scaled = rate * math.sqrt(1 - rule.beta_2**step) / (1 - rule.beta_1**step)
        kept = 1 - rate * rule.weight_decay
        numbers = [scaled, rule.beta_1, rule.beta_2, rule.epsilon, kept]
        _run("adam", p, [g, slots["m"], slots["v"], count], numbers, "d d d d d")

    return update
