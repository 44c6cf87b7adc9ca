"""The fused updates against the optimizers of allreduce.optim, on float64 arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import optim
from tests.gpu.kernels import SUFFIXES, run

STEP = 3
Call = Callable[..., None]


def sgd(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    if s:
        go(
            "momentum",
            p,
            g,
            s["momentum"],
            count,
            o.learning_rate,
            o.momentum,
            np.int32(o.nesterov),
        )
    else:
        go("sgd", p, g, count, o.learning_rate)


def adam(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    rate = o.learning_rate * math.sqrt(1 - o.beta_2**STEP) / (1 - o.beta_1**STEP)
    keep = 1 - o.learning_rate * o.weight_decay
    go("adam", p, g, s["m"], s["v"], count, rate, o.beta_1, o.beta_2, o.epsilon, keep)


def adagrad(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    start = o.initial_accumulator_value + o.epsilon
    go("adagrad", p, g, s["accumulator"], count, o.learning_rate, start)


def rmsprop(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    slots = (s["velocity"], s.get("mean"), s.get("momentum"))
    go("rmsprop", p, g, *slots, count, o.learning_rate, o.rho, o.momentum, o.epsilon)


def lion(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    go("lion", p, g, s["m"], count, o.learning_rate, o.beta_1, o.beta_2, o.weight_decay)


def lars(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    norms = np.empty(2)
    go("lars_norms", p, g, count, norms, grid=1)
    numbers = (o.learning_rate, o.momentum, o.weight_decay, o.trust_coefficient)
    go("lars", p, g, s["momentum"], count, norms, *numbers)


def lamb(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    norms, fixes = np.empty(2), (1 - o.beta_1**STEP, 1 - o.beta_2**STEP)
    numbers = (o.beta_1, o.beta_2, o.epsilon, o.weight_decay, *fixes)
    go("lamb_norms", p, g, s["m"], s["v"], count, norms, *numbers, grid=1)
    settings = (o.learning_rate, o.epsilon, o.weight_decay, *fixes)
    go("lamb", p, s["m"], s["v"], norms, *settings)


CASES = [
    (optim.SGD(0.1), sgd),
    (optim.SGD(0.1, momentum=0.9), sgd),
    (optim.SGD(0.1, momentum=0.9, nesterov=True), sgd),
    (optim.Adam(0.01), adam),
    (optim.AdamW(0.01, weight_decay=0.1), adam),
    (optim.Adagrad(0.01), adagrad),
    (optim.RMSprop(0.01), rmsprop),
    (optim.RMSprop(0.01, momentum=0.9, centered=True), rmsprop),
    (optim.Lion(0.01, weight_decay=0.1), lion),
    (optim.LARS(0.1, weight_decay=0.01), lars),
    (optim.Lamb(0.01, weight_decay=0.1), lamb),
]


@pytest.mark.parametrize(("n", "skip"), [(1, 0), (5, 1), (1027, 0), (1027, 1)])
@pytest.mark.parametrize(("suffix", "tolerance"), [("f32", 2e-5), ("f64", 1e-12)])
@pytest.mark.parametrize(("optimizer", "kernel"), CASES)
def test_updates_are_those_of_the_optimizers(
    optimizer: Any, kernel: Any, suffix: str, tolerance: float, n: int, skip: int
) -> None:
    def go(name: str, *arguments: Any, grid: int = 3) -> None:
        given = [np.float64(x) if isinstance(x, float) else x for x in arguments]
        run("optimizers", f"{name}_{suffix}", *given, np.int64(n), grid=grid, skip=skip)

    for samples in (8, 0):  # without samples, gradients count as zeros
        p, g, *more = np.random.default_rng(n).standard_normal((5, n)).astype(SUFFIXES[suffix])
        slots: dict[str, Any] = {
            name: np.abs(x) + x.dtype.type(1)
            for name, x in zip(optimizer.slots, more, strict=False)
        }
        if "mean" in slots:
            slots["mean"] /= 100  # its square is less than the mean of squares
        count = np.array([samples], p.dtype)
        wide = {name: slot.astype(float) for name, slot in slots.items()}
        expected = p.astype(float)
        optimizer.update(expected, g.astype(float), wide, count.astype(float), STEP)
        kernel(optimizer, p, g, slots, count, go)
        np.testing.assert_allclose(p, expected, tolerance, tolerance)
        for name, slot in slots.items():
            np.testing.assert_allclose(slot, wide[name], tolerance, tolerance)
