"""Updates of optimizers, one pass over a range of an arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from allreduce.devices.cuda.arrays import pointer
from allreduce.devices.cuda.kernels.layout import suffix
from allreduce.devices.cuda.modules import BLOCK, blocks, launch
from allreduce.devices.cuda.streams import current_stream

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
            *(pointer(parameters), *map(_pointer, arrays), *numbers, parameters.size),
        )


def _limit(rule: Any) -> float:
    """Return the largest absolute value of an element of a mean gradient."""
    return math.inf if rule.clip_value is None else float(rule.clip_value)


def averaged(update: Update, rule: Any) -> Update:
    """Return an update that also keeps the parameters' moving average."""
    (name,) = rule.average_slots

    def run(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        update(p, g, {each: slots[each] for each in slots if each != name}, count, step)
        _run("average", slots[name], [p], [rule.ema_momentum if step > 1 else 0.0], "d")

    return run


def clip(divisor: Any, gradients: Any, count: Any, limit: float) -> None:
    """Set what to divide gradients by, so that their means' norm is `limit` at most."""
    end, grid = suffix(gradients.dtype), _norm_blocks(gradients.size)
    sums = current_stream().device.scratch((2 * grid,), np.float64)
    launch(
        *("optimizers", f"squares_{end}", grid, "P P q"),
        *(pointer(sums), pointer(gradients), gradients.size),
    )
    launch(
        *("optimizers", f"divisor_{end}", 1, "P P P i d"),
        *(pointer(divisor), pointer(count), pointer(sums), grid, limit),
    )


def _norm_blocks(size: int) -> int:
    """Return the number of blocks, each with sums of squares, which one block can add up."""
    return min(blocks(size), BLOCK)


def _pointer(array: Any) -> int:
    return 0 if array is None else pointer(array)


def sgd(rule: Any) -> Update:
    """Return the update of SGD."""

    def update(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        if not slots:
            _run("sgd", p, [g, count], [_limit(rule), rule.rate(step)], "d d")
            return
        numbers = [_limit(rule), rule.rate(step), rule.momentum, int(rule.nesterov)]
        _run("momentum", p, [g, slots["momentum"], count], numbers, "d d d i")

    return update


def adam(rule: Any) -> Update:
    """Return the update of Adam and AdamW; the form of `Adam.numbers`."""

    def update(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        rate = rule.rate(step)
        scaled = rate * math.sqrt(1 - rule.beta_2**step) / (1 - rule.beta_1**step)
        kept = 1 - rate * rule.weight_decay
        numbers = [_limit(rule), scaled, rule.beta_1, rule.beta_2, rule.epsilon, kept]
        _run("adam", p, [g, slots["m"], slots["v"], count], numbers, "d d d d d d")

    return update


def adagrad(rule: Any) -> Update:
    """Return the update of Adagrad."""

    def update(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        start = rule.initial_accumulator_value + rule.epsilon
        numbers = [_limit(rule), rule.rate(step), start]
        _run("adagrad", p, [g, slots["accumulator"], count], numbers, "d d d")

    return update


def rmsprop(rule: Any) -> Update:
    """Return the update of RMSprop."""

    def update(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        arrays = [g, slots["velocity"], slots.get("mean"), slots.get("momentum"), count]
        numbers = [_limit(rule), rule.rate(step), rule.rho, rule.momentum, rule.epsilon]
        _run("rmsprop", p, arrays, numbers, "d d d d d")

    return update


def lion(rule: Any) -> Update:
    """Return the update of Lion."""

    def update(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        numbers = [_limit(rule), rule.rate(step), rule.beta_1, rule.beta_2, rule.weight_decay]
        _run("lion", p, [g, slots["m"], count], numbers, "d d d d d")

    return update


def lars(rule: Any) -> Update:
    """Return the update of LARS, of one variable."""

    def update(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        if not p.size:
            return
        norms = _norms("lars", p, [g, count], [_limit(rule)])
        numbers = [_norm_blocks(p.size), _limit(rule), rule.rate(step), rule.momentum]
        numbers += [rule.weight_decay, rule.trust_coefficient]
        _run("lars", p, [g, slots["momentum"], count, norms], numbers, "i d d d d d")

    return update


def lamb(rule: Any) -> Update:
    """Return the update of LAMB, of one variable."""

    def update(p: Any, g: Any, slots: Mapping[str, Any], count: Any, step: int) -> None:
        if not p.size:
            return
        fixes = [1 - rule.beta_1**step, 1 - rule.beta_2**step]
        m, v = slots["m"], slots["v"]
        settings = [_limit(rule), rule.beta_1, rule.beta_2, rule.epsilon, rule.weight_decay]
        norms = _norms("lamb", p, [g, m, v, count], [*settings, *fixes])
        numbers = [_norm_blocks(p.size), rule.rate(step), rule.epsilon, rule.weight_decay, *fixes]
        _run("lamb", p, [m, v, norms], numbers, "i d d d d d")

    return update


def _norms(name: str, parameters: Any, arrays: list[Any], numbers: list[float]) -> Any:
    """Launch the kernel that computes a variable's two norms; returns where their parts are."""
    grid = _norm_blocks(parameters.size)
    norms = current_stream().device.scratch((2 * grid,), np.float64)
    pointers = [parameters, *arrays, norms]
    launch(
        *("optimizers", f"{name}_norms_{suffix(parameters.dtype)}", grid),
        f"{'P ' * len(pointers)}{'d ' * len(numbers)}q",
        *(*map(pointer, pointers), *numbers, parameters.size),
    )
    return norms
