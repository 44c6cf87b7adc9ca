"""Optimizers: their arithmetic against NumPy in float64, their checks, their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from allreduce import optim
from allreduce.errors import UsageError
from allreduce.graph import Variable, function


def numpy_sgd(
    p: np.ndarray, gradients: list[np.ndarray], rate: float, momentum: float, nesterov: bool
) -> np.ndarray:
    v = np.zeros_like(p)
    for g in gradients:
        v = momentum * v - rate * g
        p = p + (momentum * v - rate * g if nesterov else v)
    return p


def numpy_adam(p: np.ndarray, gradients: list[np.ndarray], rate: float) -> np.ndarray:
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        p = p - rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    return p


def run(optimizer: optim.Optimizer, start: np.ndarray, steps: int) -> np.ndarray:
    """Apply the gradient `cos(p) + p` for a number of steps."""
    variable = Variable(start, name="p")

    @function
    def step() -> None:
        from allreduce.graph import ops

        value = ops.multiply(variable, 1.0)
        optimizer.minimize(ops.sum(ops.square(value) * 0.5 + ops.exp(value)), [variable])

    for _ in range(steps):
        step()
    return variable.numpy()


def gradients_of(update: Any, start: np.ndarray, steps: int) -> np.ndarray:
    """Repeat the same with NumPy; `update(start, gradients)` replays all gradients so far."""
    p, seen = start, []
    for _ in range(steps):
        seen.append(p + np.exp(p))
        p = update(start, seen)
    return p


START = np.random.default_rng(0).normal(size=(3, 37))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_follows_its_formula(momentum: float, nesterov: bool) -> None:
    got = run(optim.SGD(0.05, momentum=momentum, nesterov=nesterov), START, 4)
    wanted = gradients_of(lambda p, g: numpy_sgd(p, g, 0.05, momentum, nesterov), START, 4)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_adam_follows_its_formula() -> None:
    optimizer = optim.Adam(0.05)
    got = run(optimizer, START, 4)
    wanted = gradients_of(lambda p, g: numpy_adam(p, g, 0.05), START, 4)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)
    assert optimizer.iterations == 4


def test_a_changed_learning_rate_holds_from_the_next_step() -> None:
    variable = Variable(np.zeros(3), name="p")
    optimizer = optim.SGD(1.0)

    @function
    def step() -> None:
        from allreduce.graph import ops

        optimizer.minimize(ops.sum(ops.multiply(variable, 1.0)), [variable])

    step()
    optimizer.learning_rate = 0.25
    step()
    assert variable.numpy().tolist() == [-1.25] * 3


def test_state_moves_to_another_optimizer() -> None:
    def stepper(optimizer: optim.Optimizer, variable: Variable) -> Any:
        @function
        def step() -> None:
            from allreduce.graph import ops

            optimizer.minimize(ops.sum(ops.exp(variable)), [variable])

        return step

    first, variable = optim.Adam(0.1), Variable(START, name="p")
    step = stepper(first, variable)
    step(), step()
    second, copy = optim.Adam(0.1), Variable(variable.numpy(), name="p")
    second.load_state(first.state())
    step()
    stepper(second, copy)()
    assert second.iterations == first.iterations == 3
    assert np.array_equal(copy.numpy(), variable.numpy())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.Adam(-1.0), "learning_rate is a finite number >= 0"),
        (lambda: optim.Adam(float("nan")), "learning_rate"),
        (lambda: optim.Adam(float("inf")), "learning_rate"),
        (lambda: optim.Adam(learning_rate="fast"), "'fast'"),
        (lambda: optim.Adam(beta_1=1.0), "beta_1 is a finite number >= 0 and < 1"),
        (lambda: optim.Adam(epsilon=0.0), "epsilon is a finite number > 0"),
        (lambda: optim.SGD(momentum=1.5), "momentum"),
        (lambda: optim.SGD(nesterov=True), "needs momentum"),
        (lambda: optim.get("adma"), "did you mean 'adam'"),
        (lambda: optim.get(optim.Adam), r"make one: Adam\(\)"),
        (lambda: optim.get(3), "an Optimizer or a name"),
        (lambda: optim.get({"name": "sgd", "config": {"lr": 1}}), "unknown argument of SGD 'lr'"),
        (lambda: optim.get({"name": "sgd", "config": 1}), "SGD's config is a dict"),
        (lambda: optim.SGD(momentum=0.9, nesterov="no"), "True or False"),  # type: ignore[arg-type]
        (lambda: optim.SGD().minimize(None, 3), "a list of variables"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_names_and_descriptions_make_optimizers() -> None:
    assert isinstance(optim.get("Adam"), optim.Adam)
    original = optim.SGD(0.3, momentum=0.5, nesterov=True)
    copy = optim.get(optim.serialize(original))
    assert isinstance(copy, optim.SGD)
    assert copy.get_config() == original.get_config()
    assert optim.get(original) is original
