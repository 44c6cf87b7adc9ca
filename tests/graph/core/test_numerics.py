"""`ar.config.enable_check_numerics`: the first operation that makes a NaN or Inf is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.errors import NumericsError, UsageError


@pytest.fixture(autouse=True)
def _looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_current", options.Options())
    ar.config.enable_check_numerics()


@pytest.fixture
def two_replicas() -> ar.Strategy:
    ar.config.set_logical_devices("CPU", 4)
    return ar.MirroredStrategy(["CPU:0", "CPU:1"])


def test_the_operation_its_line_step_and_inputs_are_named() -> None:
    @ar.function
    def step(x: Any) -> Any:
        return ar.ops.exp(ar.ops.log(x) * 2.0) + 1.0

    step(np.ones(3, np.float32))
    with pytest.raises(NumericsError) as caught:
        step(np.array([1, 0, -4], np.float32))
    said = str(caught.value)
    assert "replica 0, step 2: log at " in said
    assert "test_numerics.py:" in said
    assert "made float32(3,) from 0 to 0, 1 NaN, 1 Inf" in said
    assert "input 0: float32(3,) from -4 to 1" in said


def test_a_gradient_is_looked_at_too() -> None:
    @ar.function
    def slope(x: Any) -> Any:
        return ar.gradients(ar.ops.sum(ar.ops.sqrt(x)), [x])[0]

    with pytest.raises(NumericsError, match=r"divide at .* made float64.* 1 Inf"):
        slope(np.array([0.0, 1.0]))


def test_operations_outside_of_steps_are_looked_at() -> None:
    with pytest.raises(NumericsError, match=r"outside of steps: divide at .* made .* 1 Inf"):
        ar.ops.divide(np.array([1.0]), np.array([0.0]))


@pytest.mark.parametrize("fetched_alone", [False, True])
def test_what_depends_on_constants_alone_is_looked_at(fetched_alone: bool) -> None:
    @ar.function
    def step(x: Any) -> Any:
        missing = ar.ops.log(np.array([-1.0]))
        return missing if fetched_alone else x * missing

    with pytest.raises(NumericsError, match=r"step 1: log at .*test_numerics\.py"):
        step(np.ones(1))


def test_an_update_is_looked_at() -> None:
    w = ar.Variable(np.ones(2, np.float32), name="w")
    optimizer = ar.optim.SGD(1e38)

    @ar.function
    def step(x: Any) -> None:
        optimizer.minimize(ar.ops.sum(x * w * 1e3, axis=1), [w])

    with pytest.raises(NumericsError, match=r"step 1: the update of 'w' at .*test_num.* 2 Inf"):
        step(np.full((2, 2), 1e3, np.float32))


@pytest.mark.parametrize("fetched_alone", [False, True])
def test_collectives_are_looked_at(two_replicas: ar.Strategy, fetched_alone: bool) -> None:
    def step(x: Any) -> Any:
        total = ar.all_reduce(ar.ops.sum(x))
        return total if fetched_alone else total * 2.0

    (batch,) = two_replicas.distribute_dataset([(np.full(2, 2e38, np.float32),)])
    with pytest.raises(NumericsError, match=r"all_reduce at .* made float32.* from 2e\+38 to 2e"):
        two_replicas.run(step, args=batch)


def test_a_collective_that_ends_with_a_later_one_is_looked_at(two_replicas: ar.Strategy) -> None:
    def step(x: Any) -> Any:
        total = ar.all_reduce(ar.ops.sum(x))
        return ar.all_reduce(ar.ops.size(x, 0)) * 1.0 + ar.ops.cast(total, "float64")

    (batch,) = two_replicas.distribute_dataset([(np.full(2, 2e38, np.float32),)])
    with pytest.raises(NumericsError, match=r"all_reduce at .* made float32.* 1 Inf"):
        two_replicas.run(step, args=batch)


def test_sums_of_gradients_are_looked_at(two_replicas: ar.Strategy) -> None:
    with two_replicas.scope():
        w = ar.Variable(np.ones(1, np.float32), name="w")
        optimizer = ar.optim.SGD(1e-9)

    def step(x: Any) -> None:
        optimizer.minimize(x * ar.ops.sum(w), [w])

    (batch,) = two_replicas.distribute_dataset([(np.full(2, 2e38, np.float32),)])
    with pytest.raises(NumericsError, match=r"sum of all replicas' gradients of 'w' at .*test_num"):
        two_replicas.run(step, args=batch)


def test_it_can_be_turned_off_again() -> None:
    @ar.function
    def step(x: Any) -> Any:
        return ar.ops.log(x)

    with pytest.raises(NumericsError):
        step(np.zeros(1))
    ar.config.enable_check_numerics(False)
    assert step(np.zeros(1)).numpy() == -np.inf
    with pytest.raises(UsageError, match="check_numerics is True or False, not 'no'"):
        ar.config.enable_check_numerics("no")  # type: ignore[arg-type]


def test_training_is_stopped_at_the_operation() -> None:
    model = ar.nn.Sequential([ar.nn.Dense(4, "relu"), ar.nn.Dense(1)])
    model.compile("sgd", lambda y, p: ar.ops.mean(ar.ops.log(p - 1000.0), axis=-1))
    with pytest.raises(NumericsError, match=r"log at .*test_numerics\.py"):
        model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
