"""The fused updates against the optimizers of allreduce.optim, on float64 arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import optim
from tests.gpu.kernels.calls import SUFFIXES, run

STEP = 3
NORMS = 3  # blocks that compute norms
Call = Callable[..., None]


def limit(o: Any) -> float:
    return math.inf if o.clip_value is None else float(o.clip_value)


def sgd(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    if s:
        go(
            "momentum",
            p,
            g,
            s["momentum"],
            count,
            limit(o),
            o.learning_rate,
            o.momentum,
            np.int32(o.nesterov),
        )
    else:
        go("sgd", p, g, count, limit(o), o.learning_rate)


def adam(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    rate = o.learning_rate * math.sqrt(1 - o.beta_2**STEP) / (1 - o.beta_1**STEP)
    keep = 1 - o.learning_rate * o.weight_decay
    go("adam", p, g, s["m"], s["v"], count, limit(o), rate, o.beta_1, o.beta_2, o.epsilon, keep)


def adagrad(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    start = o.initial_accumulator_value + o.epsilon
    go("adagrad", p, g, s["accumulator"], count, limit(o), o.learning_rate, start)


def rmsprop(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    slots = (s["velocity"], s.get("mean"), s.get("momentum"))
    go("rmsprop", p, g, *slots, count, limit(o), o.learning_rate, o.rho, o.momentum, o.epsilon)


def lion(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    go("lion", p, g, s["m"], count, limit(o), o.learning_rate, o.beta_1, o.beta_2, o.weight_decay)


def lars(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    norms = np.empty(2 * NORMS)
    go("lars_norms", p, g, count, norms, limit(o), grid=NORMS)
    numbers = (
        np.int32(NORMS),
        limit(o),
        o.learning_rate,
        o.momentum,
        o.weight_decay,
        o.trust_coefficient,
    )
    go("lars", p, g, s["momentum"], count, norms, *numbers)


def lamb(o: Any, p: Any, g: Any, s: Any, count: Any, go: Call) -> None:
    norms, fixes = np.empty(2 * NORMS), (1 - o.beta_1**STEP, 1 - o.beta_2**STEP)
    numbers = (limit(o), o.beta_1, o.beta_2, o.epsilon, o.weight_decay, *fixes)
    go("lamb_norms", p, g, s["m"], s["v"], count, norms, *numbers, grid=NORMS)
    settings = (np.int32(NORMS), o.learning_rate, o.epsilon, o.weight_decay, *fixes)
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
    (optim.Adam(0.01, clip_value=0.02), adam),
    (optim.Lion(0.01, clip_value=0.02), lion),
    (optim.LARS(0.1, clip_value=0.02), lars),
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
        sums = np.clip(g.astype(float), -limit(optimizer) * 8, limit(optimizer) * 8)
        optimizer.update(expected, sums, wide, count.astype(float), STEP)
        kernel(optimizer, p, g, slots, count, go)
        np.testing.assert_allclose(p, expected, tolerance, tolerance)
        for name, slot in slots.items():
            np.testing.assert_allclose(slot, wide[name], tolerance, tolerance)


@pytest.mark.parametrize("n", [0, 1, 1027])
@pytest.mark.parametrize("suffix", ["f32", "f64"])
def test_divisors_limit_the_norm_of_means(suffix: str, n: int) -> None:
    g: np.ndarray = np.random.default_rng(0).standard_normal(n).astype(SUFFIXES[suffix])
    norm, count = float(np.linalg.norm(g.astype(float))), np.array([8], g.dtype)
    squares, divisor = np.empty(2 * NORMS), np.empty_like(count)
    run("optimizers", f"squares_{suffix}", squares, g, np.int64(n), grid=NORMS, skip=1)
    np.testing.assert_allclose(squares[::2].sum(), norm**2, 1e-12)
    for most in (norm / 16, norm):  # of the mean: that is norm / 8
        more = (squares, np.int32(NORMS), np.float64(most))
        run("optimizers", f"divisor_{suffix}", divisor, count, *more, grid=1)
        expected = norm / most if 0 < most < norm / 8 else 8
        np.testing.assert_allclose(divisor, expected, 1e-6)


@pytest.mark.parametrize("suffix", ["f32", "f64"])
def test_averages_of_parameters(suffix: str) -> None:
    average, p = np.random.default_rng(0).standard_normal((2, 1027)).astype(SUFFIXES[suffix])
    expected = 0.9 * average.astype(float) + (1 - 0.9) * p
    run("optimizers", f"average_{suffix}", average, p, np.float64(0.9), np.int64(1027), skip=1)
    np.testing.assert_allclose(average, expected, 1e-6, 1e-6)
